"""Measures what an optimizer's step adds to the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


def moved_by(
    step: Callable[[], object], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Call a step, and return what it added to each parameter, by name."""
    moved = {name: p.detach().clone() for name, p in parameters.items()}
    step()
    for name, parameter in parameters.items():
        torch.sub(parameter.detach(), moved[name], out=moved[name])
    return moved
