"""The optimizer of what is kept in place of weights: their shards, or masters.

    lambda p: SGD([x for x in p if x in head])     the model's parameters ──▶ groups
                                                   what is kept of them   ──▶ steps

A function may choose parameters by identity or by value, and these have others.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from hocket.errors import ConfigError
from hocket.run.weights.settings import Parameters, TrainingConfig


def make_kept_optimizer(
    first: torch.optim.Optimizer,
    settings: TrainingConfig,
    own: Mapping[str, nn.Parameter],
    every: Mapping[str, nn.Parameter],
    kept: Mapping[int, nn.Parameter],
) -> torch.optim.Optimizer:
    """Make the optimizer of what is kept, with the groups of the model's parameters.

    Args:
        first: the one that was made of the model's parameters, while they were whole.
        settings: makes optimizers.
        own: the model's parameters of the stage, by name.
        every: those of the net.
        kept: what is updated in place of each, by the identity of the model's.

    Raises:
        ConfigError: an optimizer with a state or a step of its own is chosen otherwise
            for these.
    """
    names = {id(x): name for name, x in every.items()}
    names |= {id(kept[i]): name for i, name in names.items() if i in kept}
    with suppress(Exception):  # such as for no parameters at all
        parts = (
            Parameters({name: kept.get(id(x), x) for name, x in named.items()})
            for named in (own, every)
        )
        made = settings.make_stage_optimizer(*parts)
        if _groups(made, names) == _groups(first, names):
            return made
    # Others may hold the parameters in another place, too.
    if first.state or not type(first).__module__.startswith("torch.optim."):
        raise ConfigError(
            f"the function that makes {type(first).__name__} chooses parameters by "
            "identity or by value, and what is kept of them (shards, masters) has "
            "others: choose them by name, which `parameters.named()` has"
        )
    for group in first.param_groups:
        group["params"] = [kept.get(id(p), p) for p in group["params"]]
    return first


def _groups(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Return the groups' options as texts, with the names of their parameters."""
    return [
        {
            key: [names[id(p)] for p in value] if key == "params" else repr(value)
            for key, value in group.items()
        }
        for group in optimizer.param_groups
    ]
