"""Losses that are means over targets whose number differs by microbatch.

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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import ConfigError, ModelError
from hocket.model.trace.per_sample import unshared
from hocket.run.data.batch import Microbatch
from hocket.run.data.loss import DeclaredLoss, LossFunction


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
