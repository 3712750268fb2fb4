#!/usr/bin/env bash
# torch 2.13.0, gloo on CPUs.
#
# Two device meshes over the same ranks with the same dimension names are equal, and
# DTensor remembers what came of an operator by equal arguments: the result of an operator
# on a DTensor of the second mesh lies on the first one. Where each mesh has groups of its
# own (DeviceMesh.from_group), and the first one's group was destroyed, as when a first
# model is given up and a second one is made in the same process, what an operator that was
# called before (here p * 2) makes fails in its first collective, and what one makes that
# was not (here p.abs()) does not. The second mesh's own group is there all the time.
#
# Seen 2026-11-29, on both of two workers:
#   equal meshes: True, same object: False
#   p.full_tensor(): fine
#   p.abs().full_tensor(), not called before: fine
#   (p * 2).full_tensor(), called before: Could not resolve the process group
#   mesh of p * 2 is the first one: True
#
# Ends with 0 if that is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/two.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor


def made(values):
    group = dist.new_group([0, 1])
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    return group, mesh, distribute_tensor(values, mesh, [Shard(0)])


def say(rank, text):
    if not rank:
        print(text, flush=True)


def tried(call):
    try:
        call()
    except RuntimeError as error:
        return str(error).split(" registered")[0]
    return "fine"


def work(rank, path):
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    group, first, p = made(torch.ones(4, 2))
    (p * 2).full_tensor()
    dist.destroy_process_group(group)
    _, second, p = made(torch.ones(4, 2))
    say(rank, f"equal meshes: {first == second}, same object: {first is second}")
    say(rank, f"p.full_tensor(): {tried(p.full_tensor)}")
    say(rank, f"p.abs().full_tensor(), not called before: {tried(lambda: p.abs().full_tensor())}")
    say(rank, f"(p * 2).full_tensor(), called before: {tried(lambda: (p * 2).full_tensor())}")
    say(rank, f"mesh of p * 2 is the first one: {(p * 2).device_mesh is first}")
    dist.barrier()


if __name__ == "__main__":
    mp.spawn(work, (f"{sys.argv[1]}/store",), nprocs=2)
PY
timeout 120 "$folder/venv/bin/python" "$folder/two.py" "$folder" \
    2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors"; exit 1; }
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
equal meshes: True, same object: False
p.full_tensor(): fine
p.abs().full_tensor(), not called before: fine
(p * 2).full_tensor(), called before: Could not resolve the process group
mesh of p * 2 is the first one: True
SEEN
echo "still so"
