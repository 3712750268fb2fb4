"""An optimizer trains stage by stage as it trains all parameters, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hocket.errors import ConfigError
from hocket.run.weights.settings import Parameters, TrainingConfig
from hocket.run.weights.step_check import refuse_joint_steps
from tests.run.support.differing_workers import ClipsByItself


class Adapts(torch.optim.Optimizer):
    """Finds its rate from all gradients so far (D-Adaptation's idea, simplified)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.seen = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        self.seen += sum(float(p.grad.abs().sum()) for p in params)
        for p in params:
            p.sub_(p.grad.sign() / self.seen)


class Drifts(torch.optim.SGD):
    """Adds noise to the weights (Langevin)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(0.1 * torch.randn_like(p))


def decayed_by_number(parameters: Parameters) -> torch.optim.Optimizer:
    """Rates by place in the list of all parameters."""
    groups = [{"params": [p], "lr": 0.9**i} for i, p in enumerate(parameters)]
    return torch.optim.SGD(groups, 0.1)


def decayed_by_name(parameters: Parameters) -> torch.optim.Optimizer:
    """Rates by layer."""
    named = parameters.named()
    groups = [{"params": [p], "lr": 0.9 ** int(name[0])} for name, p in named]
    return torch.optim.SGD(groups, 0.1)


def stages() -> dict[str, dict[str, Tensor]]:
    """Three layers; the last stage trains nothing."""
    layers = {str(i): nn.Linear(9, 9) for i in range(3)}
    parts = [{"0": layers["0"], "1": layers["1"]}, {"2": layers["2"]}, {}]
    named = (nn.ModuleDict(part).named_parameters() for part in parts)
    return {f"stage {i}": dict(part) for i, part in enumerate(named)}


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        torch.optim.Adafactor,
        torch.optim.Rprop,
        torch.optim.LBFGS,  # needs a closure: not tried here
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        decayed_by_name,
        decayed_by_number,
        partial(Drifts, lr=0.1),  # what it draws differs in any case
    ],
)
def test_steps_of_each_parameter_by_itself_pass(make: Callable[..., Any]) -> None:
    """They are the same to the last bit; and the user's random numbers, too."""
    parts, before = stages(), torch.get_rng_state()
    refuse_joint_steps(TrainingConfig(optimizer=make), parts)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make", [partial(ClipsByItself, lr=0.1), Adapts])
def test_steps_of_all_parameters_together_are_refused(make: Callable[..., Any]) -> None:
    """They trained to other weights; one stage alone passes."""
    said = (
        r"other weights by stage.*\d\.(weight|bias) \(stage [01]\) moves by [\d.e-]+ "
    )
    settings = TrainingConfig(optimizer=make)
    with pytest.raises(ConfigError, match=said):
        refuse_joint_steps(settings, stages())
    refuse_joint_steps(settings, {x: stages()[x] for x in ("stage 0", "stage 2")})
