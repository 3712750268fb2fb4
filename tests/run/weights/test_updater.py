"""Op U: one stage's weights, their averages, and no gradient left behind."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hocket.run.weights.settings import Parameters, TrainingConfig
from hocket.run.weights.updater import Updater


def descent(parameters: Parameters) -> torch.optim.Optimizer:
    """Plain gradient descent."""
    return torch.optim.SGD(parameters, lr=0.1)


def updater_of(module: nn.Module, settings: TrainingConfig) -> Updater:
    """Of all that the module has."""
    return Updater(dict(module.named_parameters()), settings)


def test_averages_are_torchs() -> None:
    """From the first weights on, after every update."""
    torch.manual_seed(2)
    module = nn.Linear(3, 3)
    updater = updater_of(module, TrainingConfig(optimizer=descent, ema_decay=0.75))
    theirs = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    theirs.update_parameters(module)  # the first time it copies
    for _ in range(5):
        module(torch.randn(4, 3)).square().mean().backward()
        updater.update()
        theirs.update_parameters(module)
    assert updater.ema is not None
    for name, value in theirs.module.named_parameters():
        assert torch.equal(updater.ema[name], value)


def test_swapping_twice_changes_nothing() -> None:
    """Not even where the weights lie, which an optimizer may have noted."""
    module = nn.Linear(3, 3)
    updater = updater_of(module, TrainingConfig(optimizer=descent, ema_decay=0.75))
    module(torch.ones(1, 3)).sum().backward()
    updater.update()
    place, values = module.weight.data_ptr(), module.weight.detach().clone()
    assert updater.ema is not None
    average = updater.ema["weight"].clone()
    updater.swap()
    assert torch.equal(module.weight, average)
    updater.swap()
    assert module.weight.data_ptr() == place
    assert torch.equal(module.weight, values)
    assert torch.equal(updater.ema["weight"], average)


def test_no_gradient_is_left_behind() -> None:
    """Nor of a parameter that the optimizer was not given."""
    module = nn.Linear(3, 3)
    settings = TrainingConfig(optimizer=lambda p: torch.optim.SGD(p[:1], lr=0.1))
    updater = updater_of(module, settings)
    module(torch.ones(1, 3)).sum().backward()
    updater.update()
    assert [p.grad for p in module.parameters()] == [None, None]


def test_a_frozen_stage_has_nothing_to_update() -> None:
    """No optimizer, no schedule, and averages of nothing."""
    module = nn.Linear(3, 3).requires_grad_(requires_grad=False)
    updater = updater_of(module, TrainingConfig(optimizer=descent, ema_decay=0.9))
    updater.update()
    updater.swap()
    assert (updater.optimizer, updater.scheduler, updater.ema) == (None, None, {})
