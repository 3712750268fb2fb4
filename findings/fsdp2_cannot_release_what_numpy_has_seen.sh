#!/usr/bin/env bash
# torch 2.13.0 with numpy 2.3.5, gloo on CPUs.
#
# Looking at a gathered weight as a NumPy array makes FSDP2 fail later, elsewhere: .numpy()
# marks the storage as one that cannot be resized, and FSDP2 releases a gathered weight by
# resizing it to nothing. The array need not be alive any more. So a hook, a metric or a
# checksum that reads a weight while it is whole, as in a forward, ends the step in
# "Trying to resize storage that is not resizable", raised behind the module's forward or
# backward, with no word of NumPy or of the weight. A copy before (.clone().numpy()) is
# fine, and so is .tolist().
#
# Seen 2026-11-29:
#   tolist(): released
#   clone().numpy(): released
#   numpy(): Trying to resize storage that is not resizable
#   is the array alive: False
#
# Ends with 0 if that is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/seen.py" <<'PY'
import gc
import sys
import weakref

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

READS = {
    "tolist()": lambda x: x.tolist(),
    "clone().numpy()": lambda x: x.clone().numpy(),
    "numpy()": lambda x: x.numpy(),
}
alive = []


def work(rank, path):
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    for name, read in READS.items():
        layer = nn.Linear(4, 4)
        fully_shard(layer)
        layer.unshard()
        found = read(layer.weight.detach())
        alive[:] = [weakref.ref(found)] if name == "numpy()" else []
        del found
        gc.collect()
        try:
            layer.reshard()
            came = "released"
        except RuntimeError as error:
            came = str(error).splitlines()[0]
        if not rank:
            print(f"{name}: {came}", flush=True)
    if not rank:
        print(f"is the array alive: {alive[0]() is not None}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    mp.spawn(work, (f"{sys.argv[1]}/store",), nprocs=2)
PY
timeout 120 "$folder/venv/bin/python" "$folder/seen.py" "$folder" \
    2> "$folder/errors" > "$folder/out" || { cat "$folder/errors"; exit 1; }
cat "$folder/out"
diff "$folder/out" - <<'SEEN'
tolist(): released
clone().numpy(): released
numpy(): Trying to resize storage that is not resizable
is the array alive: False
SEEN
echo "still so"
