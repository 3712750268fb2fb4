"""Runs a part of a net in the emulator, with the old weights that its delay promises.

Old weights are leaves of their own, which `torch.func.functional_call` uses instead of
the stage's: what autograd saved of them stays valid after updates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hocket.model.capture.no_checkpointing import around_old_weights
from hocket.model.stages.stage import StageModule


@dataclass(slots=True)
class Weight:
    """A parameter that is updated, and its old values that forwards still read.

    Args:
        parameter: the newest value.
        delay: by how many updates forwards read an older one.
        old: its values before each of the last `delay` updates, the oldest first;
            leaves.
        is_frozen: whether it has no updates now.
    """

    parameter: nn.Parameter
    delay: int
    old: deque[Tensor] = field(default_factory=deque)
    is_frozen: bool = False

    def take_gradient(self) -> None:
        """Move the gradient of the old value that was read to the newest."""
        if self.old:
            self.parameter.grad, self.old[0].grad = self.old[0].grad, None

    def keep(self) -> None:
        """Keep the value before an update, and drop those that are too old."""
        if not self.delay or self.is_frozen:
            return
        self.old.append(self.parameter.detach().clone().requires_grad_())
        if len(self.old) > self.delay:
            self.old.popleft()

    def freeze(self) -> None:
        """Let forwards read the newest value from now on."""
        self.is_frozen = True
        self.old.clear()


@dataclass(slots=True)
class Segment:
    """Some layers of one stage, which are frozen together.

    Args:
        module: the layers, with the newest weights.
        begin: the number of the first layer.
        weights: the parameters that are updated, by name.
        is_trainable: whether its stage is trained at all.

    Attributes:
        trains: whether gradients flow through it now.
    """

    module: StageModule
    begin: int
    weights: Mapping[str, Weight]
    is_trainable: bool
    trains: bool = field(init=False)

    def __post_init__(self) -> None:
        self.trains = self.is_trainable

    def __call__(self, *values: Tensor) -> Any:
        """Compute it with the weights that its delay promises."""
        with torch.set_grad_enabled(self.trains):
            # Each place once: torch puts back what it found, and in a place that it
            # fills twice (a module with two names) it finds what it put there.
            leaves = {place: w.old[0] for place, w in self._places() if w.old}
            if not leaves:
                return self.module(*values)
            with around_old_weights(max(x.delay for x in self.weights.values())):
                return functional_call(self.module, leaves, values, tie_weights=False)

    def _places(self) -> Iterator[tuple[str, Weight]]:
        """Yield each place in the modules of a parameter that is updated."""
        weights = {id(x.parameter): x for x in self.weights.values()}
        for path, module in self.module.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                if id(parameter) in weights:
                    yield f"{path}.{key}" if path else key, weights[id(parameter)]
