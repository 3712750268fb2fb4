"""Finds what a loss divides by, in the graph that autograd has made of it.

    cross_entropy(output, targets, ignore_index=0)      the targets that it counts
    ((output - targets) ** 2)[mask].mean()              the elements that are left
    (each * mask).sum() / mask.sum()                    a number

A loss that was found to be a mean over samples, and makes the same calls of torch again
with the same numbers for each microbatch, is one again: nothing else needs to be
compared. This cannot be said of calls that are not torch's own, nor of those that take
several numbers from elsewhere than the outputs, unless these are only added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from hocket.model.trace.per_sample import tensors_in
from hocket.run.stage.loss_checks.reads import graph_behind

_NEAR: Final = 1e-6  # the relative difference of numbers that is no rounding
# By the first part of their names: of SubBackward0, Sub.
_ADDING: Final = frozenset(
    {
        *("Add", "Sub", "Rsub", "Where", "MaskedFill", "Stack", "Cat", "MseLoss"),
        *("SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy"),
        "BinaryCrossEntropyWithLogits",
    }
)


class LossForm(NamedTuple):
    """How the loss of a microbatch was computed.

    Args:
        weight: the microbatch's share of the step, to any scale.
        calls: the calls of torch from the loss back to the outputs; none if the effect
            of one is not known.
        numbers: what they divide and multiply by; on an accelerator, not read yet.
    """

    weight: float
    calls: tuple[str, ...] = ()
    numbers: Sequence[Any] = ()


def form_of(total: Tensor, outputs: Any, weight: float) -> LossForm:
    """Return how a loss was computed.

    Args:
        total: the loss, before its backward.
        outputs: what it was given; nothing is looked at behind these.
        weight: the microbatch's share of the step, to any scale.
    """
    known = {x.grad_fn for x in tensors_in(outputs)}
    *_, nodes = graph_behind(total.grad_fn, known)
    try:
        found = [x for node in nodes for x in _numbers(node)]
    except (AssertionError, AttributeError, RuntimeError, ValueError):
        return LossForm(weight)  # or nothing was saved, or it has changed since
    numbers = [x.detach().clone() if isinstance(x, Tensor) else x for x in found]
    return LossForm(weight, tuple(node.name() for node in nodes), numbers)


def difference(forms: Sequence[LossForm]) -> str:
    """Describe how the losses of a step's microbatches differ in what they divide by.

    They do where one makes other calls; or where a number is neither the same for both
    nor in proportion to their weights, as one number at least must be.
    """
    counted = [(i, form) for i, form in enumerate(forms) if form.weight]
    for i, form in counted[1:]:
        begin, first = counted[0]
        numbers = [[*map(float, x.numbers)] for x in (first, form)]
        if form.calls != first.calls or len(numbers[0]) != len(numbers[1]):
            return f"microbatches {begin} and {i} are computed by other calls of torch"
        pairs, ratio = [*zip(*numbers, strict=True)], form.weight / first.weight
        scaled = [math.isclose(a * ratio, b, rel_tol=_NEAR) for a, b in pairs]
        far = [
            (abs(a - b), a, b)
            for (a, b), is_scaled in zip(pairs, scaled, strict=True)
            if not (is_scaled or (any(scaled) and math.isclose(a, b, rel_tol=_NEAR)))
        ]
        if far:
            _, a, b = max(far)
            return (
                f"a number in the loss of microbatch {begin}, what it divides by, is "
                f"{a:g}, and in that of microbatch {i} {b:g}"
            )
    return ""


def _numbers(node: Any) -> Iterator[Any]:
    """Yield what a call divides and multiplies by.

    A mask of booleans leaves out elements, and divides by nothing.

    Raises:
        ValueError: that is not known.
    """
    kind = node.name().partition("Backward")[0]
    sources = [source for source, _ in node.next_functions]
    operands = ("_saved_self", "_saved_other") if kind in ("Mul", "Div") else ()
    is_known = bool(operands) or kind in _ADDING or None not in sources
    weights = [getattr(node, x, None) for x in ("_saved_weight", "_saved_pos_weight")]
    if weights != [None, None] or isinstance(node, BackwardCFunction) or not is_known:
        raise ValueError(kind)
    if kind == "Mean":
        sizes = node._saved_self_sym_sizes
        dims = getattr(node, "_saved_dim", ()) or range(len(sizes))
        yield math.prod(sizes[i if i < len(sizes) else i - 2**64] for i in dims)
    if getattr(node, "_saved_reduction", None) == 1:  # a mean
        yield getattr(node, "_saved_total_weight", node._saved_self.numel())
    for name, source in zip(operands, [*sources, None], strict=False):
        value = getattr(node, name, None)
        if not isinstance(value, Tensor) or value.dim() == 0:
            yield 1.0 if value is None else value
        elif source is None and value.dtype is not torch.bool:
            raise ValueError(name)
