"""The state between forward and backward, and the values that want a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hocket.model.stages.cut import StageModule
from hocket.run.data.batch import Microbatch


class KeptOutputs(Protocol):
    """Outputs of a stage without backwards, by microbatch."""

    def outputs(
        self, microbatch: Microbatch, compute: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Return the outputs of a microbatch.

        Args:
            microbatch: names its samples, if the loader does.
            compute: computes them, if they are not kept.
        """


@dataclass(slots=True)
class SavedForward:
    """The part of autograd's graph that a microbatch's backward starts from.

    Args:
        leaves: the received inputs that want a gradient.
        starts: the start of the backward: the loss, or the outputs' places in the
            graph, so that they themselves need not stay.
        grads: the gradients to start with, if they are known (the loss's weight).
        depends: for each gradient that is received, whether its output depends on any
            weight or input, and so has a start.
    """

    leaves: tuple[Tensor, ...]
    starts: tuple[Tensor] | tuple[GradientEdge, ...]
    grads: tuple[Tensor] | None = None
    depends: tuple[bool, ...] = ()

    def given(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients of the starts, of those that were received."""
        return self.grads or tuple(compress(grads, self.depends))

    def found(self, grads: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
        """Return the gradients of the leaves; zeros for those without one."""
        pairs = zip(self.leaves, grads, strict=True)
        return tuple([torch.zeros_like(x) if dx is None else dx for x, dx in pairs])


@dataclass(frozen=True, slots=True)
class StageGradients:
    """The values of a stage that want a gradient.

    Args:
        takes: for each input, whether its gradient is computed.
        gives: for each output, whether its gradient is given.
    """

    takes: tuple[bool, ...]
    gives: tuple[bool, ...]

    @classmethod
    def of(cls, module: StageModule) -> StageGradients:
        """Return those of a model that is trained as it is."""
        return cls(
            tuple(value.requires_grad for value in module.inputs),
            tuple(value.requires_grad for value in module.outputs),
        )
