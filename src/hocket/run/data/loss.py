"""Checks what a loss function returns, and adds losses up.

Of losses that are means over targets whose number differs by microbatch:

    microbatch        0        1          by samples         by targets that count
    targets           a b c -  d - - -
    mean of them      1.0      3.0        (1 + 3) / 2 = 2    (3 * 1 + 1 * 3) / 4 = 1.5

The second is the loss of the whole batch: it weights each microbatch's mean by the
number of targets that this mean was divided by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import ConfigError, ModelError
from hocket.model.trace.per_sample import unshared
from hocket.run.data.batch import Microbatch
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


@dataclass(frozen=True, slots=True)
class TokenMean(DeclaredLoss):
    """Declares a mean over targets that count, as with `ignore_index` or class weights.

    The pipeline trains the loss of the whole batch exactly: the weight of a microbatch
    is its count over the step's count, which the replicas add up before the first
    forward (one number). A microbatch whose count is 0 contributes nothing, although
    its mean is not a number.

    Args:
        loss: `loss(output, targets)` returns the mean over the targets that count, as
            a scalar tensor or a dict of named ones.
        count: `count(targets)` returns what that mean is divided by: the number of
            targets that count, or the sum of their weights. Not needed for
            `torch.nn.CrossEntropyLoss` and `NLLLoss`.

    Raises:
        ConfigError: `count` is missing.
    """

    count: Callable[[Any], Tensor | float] | None = None

    def __post_init__(self) -> None:
        """Refuse a loss whose count is not known."""
        if self.count is None and not counts_itself(self.loss):
            raise ConfigError(
                "TokenMean(loss) knows what torch.nn.CrossEntropyLoss and NLLLoss with "
                "reduction='mean' divide by. For other losses give it: "
                "hocket.TokenMean(loss, count=count), where count(targets) returns the "
                "number of targets that count, or the sum of their class weights"
            )

    def count_of(self, targets: Any) -> float:
        """Return what the mean over these targets is divided by.

        Raises:
            ModelError: it is negative, or no finite number.
        """
        count = self.count or partial(_torch_count, self.loss)
        value = float(count(unshared(targets)))
        if not 0.0 <= value < math.inf:
            raise ModelError(
                f"TokenMean's count(targets) is {value:g}: it must return the number "
                "of targets that count, or the sum of their weights, 0 or more"
            )
        return value


def counts_itself(loss: LossFunction) -> bool:
    """Return whether `TokenMean` needs no count for a loss."""
    if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return False
    return loss.reduction == "mean"


def _torch_count(loss: Any, targets: Tensor) -> float:
    if targets.is_floating_point():  # probabilities: (N, C, ...)
        return targets.numel() / targets.shape[1]
    kept = targets[targets != loss.ignore_index]
    if loss.weight is None:
        return kept.numel()
    return float(loss.weight.to(kept.device, torch.float64)[kept].sum())


def count_of(loss: object, part: Microbatch) -> float:
    """Return a microbatch's weight before it is divided by the step's.

    Args:
        loss: a loss function.
        part: the microbatch.

    Returns:
        What a `TokenMean` counts; the number of samples for other losses.
    """
    if isinstance(loss, TokenMean):
        return loss.count_of(part.targets)
    return part.num_samples


def zero_losses(named: Mapping[str, Tensor], output: Any) -> dict[str, Tensor]:
    """Return zeros for the losses of a microbatch without a target that counts.

    Outputs that the loss reads get a gradient of 0, the others none.

    Args:
        named: the losses; they and their gradients may be NaN.
        output: what the loss reads: the model's output, and those of other nets.
    """
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(torch.zeros_like)
    return {
        name: 0.0 * value.nan_to_num(0.0, 0.0, 0.0) for name, value in named.items()
    }
