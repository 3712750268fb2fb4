#!/usr/bin/env bash
# torch 2.13.0, CPU.
#
# `p.grad_dtype = torch.float32` lets the gradients of a parameter in bfloat16 add up in
# float32 (new in torch; an attribute of the parameter). Whatever makes another parameter
# of it drops the setting, without a word: a deep copy of the model, torch.save and load,
# load_state_dict(assign=True), a parametrization such as weight_norm, and fully_shard.
# The loop that set it goes on adding up in bfloat16, in which 256 + 1 is 256. What
# changes the type in place keeps it: after model.float().bfloat16() gradients are still
# float32. Optimizers and DDP refuse such gradients; clip_grad_norm_ takes them. So set it
# on the parameters that are trained, last of all, and look at p.grad.dtype once.
#
# Seen 2026-11-29, 300 backwards whose gradients are 1:
#   the model itself: torch.float32, 300
#   a deep copy: torch.bfloat16, 256
#   saved and loaded: torch.bfloat16, 256
#   load_state_dict(assign=True): torch.bfloat16, 256
#   weight_norm: torch.bfloat16
#   fully_shard: torch.bfloat16, 256
#   to float32 and back: torch.float32, 300
#   AdamW.step(): expected dtype c10::BFloat16 for `end` but got dtype float
#   DistributedDataParallel: Expected BFloat16, got Float
#
# Ends with 0 if that is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/lost.py" <<'PY'
import copy
import io
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

NUM = 300
x = torch.ones(1, 4, dtype=torch.bfloat16)


def make():
    layer = nn.Linear(4, 1, bias=False).to(torch.bfloat16)
    layer.weight.grad_dtype = torch.float32
    return layer


def total(layer):
    for _ in range(NUM):
        layer(x).sum().backward()
    grad = layer.weight.grad
    whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return f"{grad.dtype}, {whole[0, 0].item():.0f}"


def error_of(function):
    try:
        function()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "no error"


file = io.BytesIO()
torch.save(make(), file)
file.seek(0)
assigned = make()
assigned.load_state_dict(assigned.state_dict(), assign=True)
stepped = make()
total(stepped)
optimizer = torch.optim.AdamW(stepped.parameters(), 1e-3)
dist.init_process_group("gloo", store=dist.FileStore(f"{sys.argv[1]}/store", 1), rank=0, world_size=1)
sharded = make()
fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
replica = DistributedDataParallel(make())
print("the model itself:", total(make()))
print("a deep copy:", total(copy.deepcopy(make())))
print("saved and loaded:", total(torch.load(file, weights_only=False)))
print("load_state_dict(assign=True):", total(assigned))
print("weight_norm:", *{p.grad_dtype for p in weight_norm(make()).parameters()})
print("fully_shard:", total(sharded))
print("to float32 and back:", total(make().float().bfloat16()))
print("AdamW.step():", error_of(optimizer.step))
print("DistributedDataParallel:", error_of(lambda: replica(x).sum().backward()))
PY
timeout 120 "$folder/venv/bin/python" "$folder/lost.py" "$folder" \
    2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors"; exit 1; }
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
the model itself: torch.float32, 300
a deep copy: torch.bfloat16, 256
saved and loaded: torch.bfloat16, 256
load_state_dict(assign=True): torch.bfloat16, 256
weight_norm: torch.bfloat16
fully_shard: torch.bfloat16, 256
to float32 and back: torch.float32, 300
AdamW.step(): expected dtype c10::BFloat16 for `end` but got dtype float
DistributedDataParallel: Expected BFloat16, got Float
SEEN
echo "still so"
