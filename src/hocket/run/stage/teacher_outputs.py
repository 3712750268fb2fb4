"""What a student's loss reads of its teachers: `loss(output, targets, teachers)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import ConfigError
from hocket.run.data.batch_output import BatchOutput
from hocket.run.data.loss import DeclaredLoss, LossFunction, WholeBatch


@dataclass(frozen=True, slots=True)
class TeacherOutputs:
    """The outputs of one teacher, in the structure that its model returns.

    Args:
        name: the teacher's name.
        own: its outputs of the samples that the loss is called with.
        whole: its outputs of the whole batch, joined along dimension 0; None where
            microbatches read their own samples alone.
    """

    name: str
    own: Any
    whole: BatchOutput | None = None

    @property
    def all(self) -> Any:
        """The outputs of the whole batch, over all replicas; read them only.

        Raises:
            ConfigError: the teacher has `whole_batch=False`.
        """
        return self._whole("all").all

    @property
    def rows(self) -> Tensor:
        """The rows of `all` that are `own`: (samples,) of int64.

        Raises:
            ConfigError: the teacher has `whole_batch=False`.
        """
        return self._whole("rows").rows

    def _whole(self, what: str) -> BatchOutput:
        if self.whole is None:
            raise ConfigError(
                f"the loss reads teachers[{self.name!r}].{what}, and each microbatch "
                "has this teacher's outputs of its own samples alone (.own): give "
                "Teacher(..., whole_batch=True)"
            )
        return self.whole


@dataclass(frozen=True, slots=True)
class TeacherLoss:
    """Calls `loss(output, targets, teachers)` with the outputs that the engine gives.

    Args:
        loss: the user's.
        names: the teachers' names, in the order of their outputs.
        over_batch: whether the loss is over the whole batch (op L).
    """

    loss: LossFunction
    names: tuple[str, ...]
    over_batch: bool = False

    def __call__(
        self, output: Any, targets: Any, *others: Any
    ) -> Tensor | Mapping[str, Tensor]:
        """Compute the loss."""
        teachers = {
            name: self._outputs(name, other)
            for name, other in zip(self.names, others, strict=True)
        }
        return self.loss(output, targets, teachers)

    def _outputs(self, name: str, other: Any) -> TeacherOutputs:
        if isinstance(other, BatchOutput):
            return TeacherOutputs(name, other.own, other)
        if not self.over_batch:
            return TeacherOutputs(name, other)
        first = pytree.tree_leaves(other)[0]
        rows = torch.arange(len(first), device=first.device)
        return TeacherOutputs(name, other, BatchOutput(other, rows))


def with_teachers(loss: LossFunction, names: Sequence[str]) -> LossFunction:
    """Return the loss that the engine calls, of one that reads teachers' outputs.

    Args:
        loss: the user's; may be in a `WholeBatch`, a `TokenMean` or a `PerMicrobatch`.
        names: the teachers' names, in the order of their outputs.
    """
    if isinstance(loss, DeclaredLoss):
        over_batch = isinstance(loss, WholeBatch)
        return replace(loss, loss=TeacherLoss(loss.loss, tuple(names), over_batch))
    return TeacherLoss(loss, tuple(names))


def user_loss(loss: LossFunction) -> LossFunction:
    """Return the innermost loss: what the user gave, without what declares its kind."""
    while isinstance(loss, DeclaredLoss | TeacherLoss):
        loss = loss.loss
    return loss


def takes_teachers(loss: LossFunction) -> bool:
    """Return whether a loss may be called as `loss(output, targets, teachers)`."""
    inner = user_loss(loss)
    called: Callable[..., object] = (
        inner.forward if isinstance(inner, nn.Module) else inner
    )
    try:
        inspect.signature(called).bind(None, None, {})
    except TypeError:
        return False
    except ValueError:  # it has no signature, as some built-in functions
        return True
    return True
