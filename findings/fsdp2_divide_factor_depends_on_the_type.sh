#!/usr/bin/env bash
# torch 2.13.0, gloo on CPUs.
#
# FSDPModule.set_gradient_divide_factor(1.0) asks FSDP2 for the sum of gradients in place
# of their mean, for a loop whose losses are divided already. Whether that works on gloo
# depends on the type of the weights: of float64 and float16 torch divides by itself, of
# float32 and bfloat16 it has the reduction multiply (PREMUL_SUM), which gloo lacks. So a
# loop that was proved right in float64 ends at the first backward in float32, in an error
# that names neither FSDP nor the factor. Without a factor, and with one that equals the
# number of workers, the mean is taken (AVG), which gloo has.
# set_force_sum_reduction_for_comms(True) makes all types work alike.
#
# Seen 2026-11-29, gradient 1 on each of two workers:
#   float64 factor 1.0: 2.0
#   float32 factor 1.0: Cannot use ReduceOp.PREMUL_SUM with Gloo
#   float32 factor 2.0: 1.0
#   float32 no factor: 1.0
#   float32 factor 1.0, sums forced: 2.0
#
# Ends with 0 if that is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/factor.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def gradient(dtype, factor, forced):
    layer = nn.Linear(2, 2, bias=False, dtype=dtype)
    unit = fully_shard(layer)
    if factor is not None:
        unit.set_gradient_divide_factor(factor)
    unit.set_force_sum_reduction_for_comms(forced)
    try:
        layer(torch.ones(1, 2, dtype=dtype)).sum().backward()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return layer.weight.grad.to_local()[0, 0].item()


def work(rank, path):
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    for dtype, factor, forced in (
        (torch.float64, 1.0, False),
        (torch.float32, 1.0, False),
        (torch.float32, 2.0, False),
        (torch.float32, None, False),
        (torch.float32, 1.0, True),
    ):
        found = gradient(dtype, factor, forced)
        name = str(dtype).removeprefix("torch.")
        how = "no factor" if factor is None else f"factor {factor}"
        if not rank:
            print(f"{name} {how}{', sums forced' * forced}: {found}", flush=True)
        dist.barrier()


if __name__ == "__main__":
    mp.spawn(work, (f"{sys.argv[1]}/store",), nprocs=2)
PY
timeout 120 "$folder/venv/bin/python" "$folder/factor.py" "$folder" \
    2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors"; exit 1; }
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
float64 factor 1.0: 2.0
float32 factor 1.0: Cannot use ReduceOp.PREMUL_SUM with Gloo
float32 factor 2.0: 1.0
float32 no factor: 1.0
float32 factor 1.0, sums forced: 2.0
SEEN
echo "still so"
