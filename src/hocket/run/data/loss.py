"""Checks what a loss function returns, and adds losses up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import Tensor

from hocket.errors import ModelError
from hocket.model.trace.per_sample import unshared
from hocket.signatures import function_fault

LossFunction = Callable[..., Tensor | Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class DeclaredLoss:
    """A loss of which the user has said what it is a mean of, or over.

    Args:
        loss: the user's.
    """

    loss: LossFunction

    def __call__(
        self, output: Any, targets: Any, *others: Any
    ) -> Tensor | Mapping[str, Tensor]:
        """Compute the loss."""
        return self.loss(output, targets, *others)


@dataclass(frozen=True, slots=True)
class WholeBatch(DeclaredLoss):
    """Declares a loss over the whole batch, which may compare any of its samples.

    The pipeline computes it once per step (op L), from the outputs of all microbatches
    and replicas, behind all forwards and before the first backward. So all microbatches
    are alive at once. `Pipeline.evaluate` computes it once per batch; with replicas,
    the first one evaluates, since the outputs must be together.

    Args:
        loss: `loss(output, targets)`, called with the outputs and targets of the whole
            batch, joined in the order of its samples; returns a scalar tensor, or a
            dict of named ones.
    """


@dataclass(frozen=True, slots=True)
class PerMicrobatch(DeclaredLoss):
    """Declares that a loss which compares samples is meant within microbatches.

    Args:
        loss: the loss function, as for `Pipeline`.
    """


TOTAL = "loss"  # the name of what is trained


def loss_fault(loss: object) -> str | None:
    """Return what is wrong with a loss; None if it can be called as one."""
    if isinstance(loss, type):
        return (
            f"loss is the class {loss.__name__}: give an object of it, such as "
            f"`{loss.__name__}()`, or a function of output and targets"
        )
    return function_fault(
        "loss must be a function of output and targets",
        loss,
        "torch.nn.functional.mse_loss",
    )


def losses_of(
    loss: Callable[..., Any], output: Any, targets: Any, *others: Any
) -> dict[str, Tensor]:
    """Call a loss function on the model's output (see `named_losses`).

    Args:
        loss: the loss function.
        output: the model's output.
        targets: the targets.
        others: outputs of other nets, for losses that read some.

    Raises:
        ModelError: the model returned None, or the loss has an unknown form.
    """
    if output is None:
        raise ModelError("the model's forward returned None; it must return a value")
    return named_losses(loss(output, unshared(targets), *others))


def named_losses(value: Any) -> dict[str, Tensor]:
    """Return the loss's scalars by name, first the one to train, named `loss`.

    A mapping with a key `loss` trains that; any other mapping trains the sum of its
    values (as detection models mean theirs). Everything else in it is reported only.

    Raises:
        ModelError: the value is neither a scalar tensor nor a mapping of them.
    """
    if isinstance(value, Tensor):
        named = {TOTAL: value}
    elif isinstance(value, Mapping) and value:
        named = {str(name): scalar for name, scalar in value.items()}
        if TOTAL not in named:
            _check_scalars(named)
            named = {TOTAL: reduce(Tensor.add, named.values()), **named}
    else:
        raise ModelError(
            "loss(output, targets) must return a scalar tensor or a dict of named "
            "scalar tensors, the mean over the microbatch's samples; got "
            f"{type(value).__name__}"
        )
    _check_scalars(named)
    return named


def _check_scalars(named: Mapping[str, Any]) -> None:
    for name, scalar in named.items():
        if not isinstance(scalar, Tensor) or scalar.dim() != 0:
            shape = tuple(scalar.shape) if isinstance(scalar, Tensor) else type(scalar)
            raise ModelError(
                f"the loss named {name!r} must be a scalar tensor, got {shape}: take "
                "the mean over the microbatch's samples"
            )
