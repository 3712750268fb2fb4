#!/usr/bin/env bash
# torch 2.13.0, CPU.
#
# `number / tensor` is no division: Tensor.__rtruediv__ returns `reciprocal(tensor) *
# number`, which is rounded twice. In float16 the reciprocal of what is below 1.53e-5 is
# more than the largest number, so that `0.1 / x` is infinite where the quotient is some
# thousands. `torch.tensor(0.1) / x`, with a tensor of no dimensions in place of the
# number, divides, and is right. In float32 the two differ by one unit in the last place
# for many values: who puts a tensor in a number's place, for a learned scale or for a
# graph that takes another number at each step, computes something else by that.
#
# Seen 2026-11-30, x = (1.2e-5, 1.5e-5, 0.3) in float16:
#   0.1 / x: [inf, inf, 0.333251953125]
#   tensor(0.1) / x: [8344.0, 6656.0, 0.333251953125]
#   float32: 7.7 / x differs in some of 10000 values: True
#
# Ends with 0 if that is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/quotients.py" <<'PY'
import torch

x = torch.tensor([1.2e-5, 1.5e-5, 0.3], dtype=torch.float16)
by_number, by_tensor = 0.1 / x, torch.tensor(0.1) / x
print("0.1 / x:", by_number.tolist())
print("tensor(0.1) / x:", by_tensor.tolist())
assert by_number.isinf().tolist() == [True, True, False]
assert by_tensor.isfinite().all()
torch.testing.assert_close(by_tensor.double(), 0.1 / x.double(), rtol=1e-3, atol=0)

z = torch.rand(10000, generator=torch.Generator().manual_seed(0)) + 0.01
differs = not torch.equal(7.7 / z, torch.tensor(7.7, dtype=torch.float64) / z)
print("float32: 7.7 / x differs in some of 10000 values:", differs)
assert differs
PY
"$folder/venv/bin/python" "$folder/quotients.py"
