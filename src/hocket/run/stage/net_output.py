"""What other nets, or a loss over the batch, read of a net's output.

Its structure; a student's loss reads its teachers': `loss(output, targets, teachers)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import ConfigError, ModelError
from hocket.run.data.batch import BatchOutput, Microbatch
from hocket.run.data.loss import DeclaredLoss, LossFunction, WholeBatch


@dataclass(frozen=True, slots=True)
class NetOutput:
    """The structure of a net's output that flows to other nets.

    Args:
        spec: puts the leaves back into the model's structure.
        wants_grad: for each leaf, whether it can have a gradient.
        is_whole: whether a reader gets it for the whole batch.
    """

    spec: pytree.TreeSpec
    wants_grad: tuple[bool, ...]
    is_whole: bool = False

    @classmethod
    def of(cls, output: Any, net: str) -> NetOutput:
        """Return the structure of an output.

        Raises:
            ModelError: a leaf is no tensor.
        """
        leaves, spec = pytree.tree_flatten(output)
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            kinds = ", ".join(type(leaf).__name__ for leaf in leaves) or "nothing"
            raise ModelError(
                f"the output of net {net} goes to another stage or to a loss over the "
                f"whole batch, so it must hold tensors only; it holds {kinds}"
            )
        return cls(spec, tuple(torch.is_floating_point(leaf) for leaf in leaves))


def example_of(output: Any, num_samples: int, wanted: int) -> Any:
    """Return an example of a net's output for another number of samples.

    Args:
        output: an example; tensors with samples along dimension 0 are repeated or cut.
        num_samples: those of the example.
        wanted: those of the result.
    """

    def resized(leaf: Tensor) -> Tensor:
        if leaf.dim() == 0 or len(leaf) != num_samples or num_samples == wanted:
            return leaf
        return leaf[torch.arange(wanted, device=leaf.device) % num_samples]

    return pytree.tree_map_only(Tensor, resized, output)


def rebuilt(
    leaves: Sequence[Tensor], outputs: Sequence[NetOutput], part: Microbatch
) -> list[Any]:
    """Put the leaves of several outputs into their models' structures.

    Args:
        leaves: the leaves of all outputs, one output after the other.
        outputs: their structures.
        part: the microbatch that reads them.
    """
    left = iter(leaves)
    found = [
        pytree.tree_unflatten([next(left) for _ in output.wants_grad], output.spec)
        for output in outputs
    ]
    if not any(output.is_whole for output in outputs):
        return found
    end = part.first_row + part.num_samples
    rows = torch.arange(part.first_row, end, device=leaves[0].device)
    return [
        BatchOutput(value, rows) if output.is_whole else value
        for value, output in zip(found, outputs, strict=True)
    ]


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
