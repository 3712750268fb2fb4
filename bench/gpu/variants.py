"""Variants of one step that must end with the same bits, or near them."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from bench.gpu.checked import Row, Setting, by_name
from bench.gpu.one_worker import batch_on, perceptron, pipeline_on

NUM_STEPS: Final = 3
NEAR: Final = 0.05  # relative, of weights after steps in half precision
ROUNDING: Final = 1e-5  # relative, where additions have another order


def recompute_with_dropout(setting: Setting) -> Row:
    """The second forward draws the masks of the first: equal bits."""
    again = _weights(setting, dropout=0.2, recompute="all")
    return _compared(again, _weights(setting, dropout=0.2))


def same_seed(setting: Setting) -> Row:
    """Two runs with dropout and one seed: equal bits."""
    again = _weights.__wrapped__(setting, dropout=0.2)
    return _compared(again, _weights(setting, dropout=0.2))


def other_order(setting: Setting) -> Row:
    """Dropout masks depend on no schedule: as many stages in another order."""
    other = _weights(setting, dropout=0.2, schedule="gpipe")
    return _compared(other, _weights(setting, dropout=0.2))


def zero_bubble(setting: Setting) -> Row:
    """Weight gradients of their own (W) are those of the whole backward."""
    split = _weights(setting, schedule="zb-h1")
    return _compared(split, _weights(setting), ROUNDING)


def bfloat16(setting: Setting) -> Row:
    """Near float32."""
    return _compared(_weights(setting, precision="bfloat16"), _weights(setting), NEAR)


def float16(setting: Setting) -> Row:
    """Near float32, with a loss scale."""
    return _compared(_weights(setting, precision="float16"), _weights(setting), NEAR)


CHECKS: Final = by_name(
    same_seed, other_order, recompute_with_dropout, zero_bubble, bfloat16, float16
)


@cache
def _weights(
    setting: Setting, dropout: float = 0.0, **options: Any
) -> dict[str, Tensor]:
    """The weights after some steps; exact where the device can be."""
    torch.backends.cuda.matmul.allow_tf32 = False
    batch = batch_on(setting.device)
    model = perceptron(dropout=dropout).to(setting.device)
    with pipeline_on(setting.device, model, batch, **options) as pipeline:
        for _ in range(NUM_STEPS):
            pipeline.step(batch)
        return pipeline.state_dict()


def _compared(
    found: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 0.0
) -> Row:
    """The largest relative difference; zero if the bits are equal."""
    differences = {
        name: float((found[name] - x).norm() / x.norm().clamp_min(1e-30))
        for name, x in expected.items()
    }
    largest = max(differences.values())
    equal = all(torch.equal(found[name], x) for name, x in expected.items())
    return {"equal": equal, "difference": largest, "holds": equal or largest < bound}
