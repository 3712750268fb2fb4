#!/usr/bin/env bash
# torch 2.13.0, CPU; the same in 2.14.1.
#
# A model on `meta` has the shapes of the model and no values, so that one can look at it,
# count it or export it without memory. Its strides are not the model's: the kernel that
# scaled_dot_product_attention takes on a CPU returns heads behind words in memory, and
# the one on meta heads before words. So the line with which attention usually ends,
# `x.transpose(1, 2).view(batch, words, width)`, works on the CPU and raises on meta, and
# what torch.export makes of one and the same model differs by the device that it is on:
# `reshape` is a view in one graph and a copy in the other. Fake tensors that say they are
# on a CPU have the CPU's strides: export a model under FakeTensorMode, or on its device,
# and not on meta, if strides or the operators of its graph matter.
#
# Seen 2026-11-30, 4 samples, 2 heads, 7 words, 8 numbers a head:
#   cpu: strides (112, 8, 16, 1), view works
#   meta: strides (112, 56, 8, 1), view raises RuntimeError
#   fake, cpu: strides (112, 8, 16, 1), view works
#   exported on cpu: 0 copies
#   exported on meta: 1 copies
#
# Ends with 0 if that is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/strides.py" <<'PY'
from contextlib import nullcontext

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention


def attention(device):
    q, k, v = (
        torch.zeros(4, 7, 2, 8, device=device).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    return scaled_dot_product_attention(q, k, v)


def viewed(x):
    try:
        x.transpose(1, 2).view(4, 7, 16)
    except RuntimeError as error:
        return f"raises {type(error).__name__}"
    return "works"


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        x = scaled_dot_product_attention(q, k, v)
        return x.transpose(1, 2).contiguous().flatten(2)


for name, device, mode in (
    ("cpu", "cpu", nullcontext()),
    ("meta", "meta", nullcontext()),
    ("fake, cpu", "cpu", FakeTensorMode()),
):
    with mode:
        x = attention(device)
        print(f"{name}: strides {x.stride()}, view {viewed(x)}")
for device in ("cpu", "meta"):
    x = torch.zeros(4, 7, 16, device=device)
    graph = torch.export.export(Attends().to(device), (x,)).graph
    copies = [n for n in graph.nodes if "contiguous" in str(n.target) or "clone" in str(n.target)]
    print(f"exported on {device}: {len(copies)} copies")
PY
timeout 120 "$folder/venv/bin/python" "$folder/strides.py" \
    2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors"; exit 1; }
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
cpu: strides (112, 8, 16, 1), view works
meta: strides (112, 56, 8, 1), view raises RuntimeError
fake, cpu: strides (112, 8, 16, 1), view works
exported on cpu: 0 copies
exported on meta: 1 copies
SEEN
echo "still so"
