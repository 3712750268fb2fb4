"""Refuses optimizers whose steps would not train what the loop means them to.

Such as one that has got parameters under way, whose gradients of before are gone; and
another optimizer over the same weights, of which torch says nothing:

    pipeline.step(batch)    clears all gradients behind its update
    another.step()          finds none
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from hocket.errors import ConfigError
from hocket.run.weights.settings import members


class OptimizerCheck:
    """Knows what an optimizer trains, and around each of its steps looks at it.

    Args:
        optimizer: the optimizer of a stage or of a compiled step; None if it has none.
        parameters: all of its net, by name, with those that optimizers leave out;
            referred to weakly, for a worker keeps only those of its own stages.
        models: the model's own, where `parameters` are shards of them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        parameters: Mapping[str, nn.Parameter],
        models: Mapping[str, nn.Parameter] = MappingProxyType({}),
    ) -> None:
        self.optimizer = optimizer
        every = (*parameters.items(), *models.items())
        self.names = WeakTensorKeyDictionary({p: n for n, p in every})
        self.is_stepping = False
        self._members = members(optimizer)
        _watch_all_optimizers()
        _CHECKS.add(self)

    def refuse_added(self) -> None:
        """Refuse parameters that the optimizer has got since its last step.

        Raises:
            ConfigError: it has got some; says of which shapes.
        """
        known, self._members = self._members, members(self.optimizer)
        if self.optimizer is None or not self._members - known:
            return
        every = (p for group in self.optimizer.param_groups for p in group["params"])
        shapes = ", ".join(str(tuple(p.shape)) for p in every if id(p) not in known)
        raise ConfigError(
            f"the optimizer has got parameters since its last step (shapes {shapes}): "
            "their gradients of earlier steps are gone, which the zero_grad() of an "
            "optimizer without them keeps. Give them to it from the start, in a group "
            "of their own with lr=0 until they train"
        )

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let optimizers step that the optimizer may consist of.

        Raises:
            ConfigError: see `refuse_added`.
        """
        self.refuse_added()
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = False


_CHECKS: Final = WeakSet[OptimizerCheck]()


@cache
def _watch_all_optimizers() -> None:
    register_optimizer_step_pre_hook(refuse_without_gradients)


def refuse_without_gradients(
    optimizer: torch.optim.Optimizer, _args: Any, _options: Any
) -> None:
    """Refuse the step of another optimizer over what a pipeline trains.

    Torch calls it before each optimizer's step. One that finds gradients there, as
    behind a backward of the loop's own, may step.

    Raises:
        ConfigError: none of these parameters has a gradient; names the first.
    """
    checks = list(_CHECKS)
    if any(x.is_stepping or x.optimizer is optimizer for x in checks):
        return
    every = [p for group in optimizer.param_groups for p in group["params"]]
    trained = [
        p for p in every if p.requires_grad and any(p in x.names for x in checks)
    ]
    if trained and all(p.grad is None for p in trained):
        name = next(x.names[trained[0]] for x in checks if trained[0] in x.names)
        raise ConfigError(
            f"{type(optimizer).__name__}.step() finds no gradient: {name} is in a "
            "pipeline or a compiled step, whose step() does the backwards and clears "
            "all gradients behind its own update. Give it to optimizer= in a group of "
            "its own, with the options that it needs"
        )
