"""Compares the loss of some samples with the losses of two parts of them.

A weighted mean over samples, whose weights follow from the targets alone, is

    loss(A and B) = r loss(A) + s loss(B)      r + s = 1
    dloss(A and B)/dy_i = r dloss(A)/dy_i      for each sample i of A, and s in B

so that other samples rescale a sample's gradient and do nothing else to it. The share r
follows from the gradients. A loss that compares samples turns them; one that is a
function of a mean, such as a root of a mean square, has shares whose sum is not 1.

Outputs of several leaves may have a share for each: a loss over words and another one
over sentences are two means.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossOfRows:
    """The loss of some samples.

    Args:
        value: the loss.
        grads: its gradient in each leaf of the output that has rows, zero in those that
            it does not read.
    """

    value: Tensor
    grads: Sequence[Tensor]


def two_parts(num: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ways to divide `num` samples: others change, and their number."""
    rows = torch.arange(num)
    seen = set()
    for is_first in (rows < 1, rows < num // 2, rows % 2 < 1):
        key = tuple(is_first.tolist())
        if is_first.any() and not is_first.all() and key not in seen:
            seen.add(key)
            yield rows[is_first], rows[~is_first]


def is_mean_of_parts(
    whole: LossOfRows,
    parts: Sequence[LossOfRows],
    rows: Sequence[Tensor],
) -> bool:
    """Return whether a loss may be a weighted mean of the losses of its two parts.

    Args:
        whole: the loss of all samples.
        parts: the losses of both parts.
        rows: the samples of both parts.
    """
    tolerance = 10 * math.sqrt(torch.finfo(whole.value.dtype).eps)
    shares = []
    for i, grad in enumerate(whole.grads):
        least = tolerance * float(grad.norm())
        found = [
            _share(grad[own.to(grad.device)], part.grads[i], least, tolerance)
            for own, part in zip(rows, parts, strict=True)
        ]
        known = [share for share in found if share is not None]
        if any(share <= 0.0 for share in known):
            return False
        if len(known) == 2 and abs(sum(known) - 1.0) > tolerance:
            return False
        if known:
            shares.append(known[0] if found[0] is not None else 1.0 - known[0])
    return _is_between(whole, parts, shares, tolerance)


def _share(
    within: Tensor, alone: Tensor, least: float, tolerance: float
) -> float | None:
    """Return by what a part's gradient is scaled among other samples.

    Args:
        within: the part's gradient among all samples.
        alone: its gradient without the others.
        least: the norm below which a gradient is taken for rounding.
        tolerance: the relative error of gradients.

    Returns:
        The factor; 0 if the gradient is turned; None if it is too small to say.
    """
    size = float(within.norm())
    if size <= least:
        return None
    square = float((alone * alone).sum())
    share = float((within * alone).sum()) / square if square else 0.0
    is_scaled = float((within - share * alone).norm()) <= tolerance * size
    return share if is_scaled else 0.0


def _is_between(
    whole: LossOfRows,
    parts: Sequence[LossOfRows],
    shares: Sequence[float],
    tolerance: float,
) -> bool:
    """Return whether the loss is the parts' mean, with these shares if they agree."""
    first, second = (float(part.value) for part in parts)
    value = float(whole.value)
    error = tolerance * max(abs(first), abs(second), abs(value))
    if not shares:
        return min(first, second) - error <= value <= max(first, second) + error
    if max(shares) - min(shares) > tolerance:
        return True  # several means with weights of their own
    expected = shares[0] * first + (1.0 - shares[0]) * second
    return abs(value - expected) <= error
