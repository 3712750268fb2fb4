"""A part of a net in the emulator, and the old weights that its forwards read.

Old weights are leaves of their own, which `torch.func.functional_call` puts in the
place of the stage's: what autograd saved of them stays valid, whatever is updated.
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
    """A parameter that moves, and what stages may still read in its place.

    Args:
        parameter: the newest.
        delay: in updates.
        old: what it was before each of the last `delay` updates, or what was predicted
            in its place, the oldest first; leaves.
    """

    parameter: nn.Parameter
    delay: int
    old: deque[Tensor] = field(default_factory=deque)

    def take_gradient(self) -> None:
        """Give the newest the gradient of the old one that was read."""
        if self.old:
            self.parameter.grad, self.old[0].grad = self.old[0].grad, None

    def keep(self, predicted: Tensor | None) -> None:
        """Keep what it is before an update, and forget what is too old."""
        if not self.delay:
            return
        value = self.parameter if predicted is None else predicted
        self.old.append(value.detach().clone().requires_grad_())
        if len(self.old) > self.delay:
            self.old.popleft()

    def freeze(self) -> None:
        """Forwards read the newest from now on."""
        self.delay = 0
        self.old.clear()


@dataclass(slots=True)
class Segment:
    """Some layers of one stage, which are frozen together.

    Args:
        module: with the newest weights.
        begin: the layer that it begins with.
        weights: those of its parameters that move, by name.
        trains: whether gradients flow through it.
    """

    module: StageModule
    begin: int
    weights: Mapping[str, Weight]
    trains: bool

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
        """Where each parameter that moves stands in any module."""
        weights = {id(x.parameter): x for x in self.weights.values()}
        for path, module in self.module.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                if id(parameter) in weights:
                    yield f"{path}.{key}" if path else key, weights[id(parameter)]
