"""The loss scale is torch's, for gradients that other workers hold too."""

from __future__ import annotations

import math

import torch
from torch import nn

from hocket.run.stage.precision import LossScale, Precision

CPU = torch.device("cpu")


def small_scaler() -> torch.amp.GradScaler:
    """One that grows after three good steps."""
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)


def test_follows_torchs_scaler() -> None:
    """Backing off, growing, and going on from a saved state."""
    overflows = [False, True, False, False, False, True, True, False, False, False]
    theirs, ours = small_scaler(), LossScale(small_scaler(), CPU)
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflowed in overflows:
        loss = weight.sum() * (math.inf if overflowed else 1.0)
        theirs.scale(loss).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(overflowed=overflowed)
        assert ours.value == theirs.get_scale()
        assert ours.scaler.state_dict() == theirs.state_dict()
        resumed = small_scaler()
        resumed.load_state_dict(ours.scaler.state_dict())
        ours = LossScale(resumed, CPU)


def test_unscales_in_place() -> None:
    """To the gradients that there would have been."""
    scale = LossScale(small_scaler(), CPU)
    grads = [torch.tensor([8.0, -4.0]), torch.tensor([1.0])]
    scale.unscale(grads)
    assert [g.tolist() for g in grads] == [[1.0, -0.5], [0.125]]
    scale.unscale([])


def test_autocast_is_entered_again_and_again() -> None:
    """One context per stage serves all its microbatches."""
    x, linear = torch.ones(2, 4), nn.Linear(4, 4)
    for precision in Precision:
        autocast = precision.autocast(CPU)
        wanted = precision.value if precision.is_autocast else "float32"
        for _ in range(2):
            with autocast:
                assert linear(x).dtype == getattr(torch, wanted)
            assert linear(x).dtype == torch.float32
