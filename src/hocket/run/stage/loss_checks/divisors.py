"""Finds what a loss divides by, in the graph that autograd has made of it.

    cross_entropy(output, targets, ignore_index=0)      the targets that it counts
    ((output - targets) ** 2)[mask].mean()              the elements that are left
    (each * mask).sum() / mask.sum()                    a number

A loss that was found to be a mean over samples, and makes the same calls of torch again
with the same numbers for each microbatch, is one again: nothing else needs to be
compared. This cannot be said of calls that are not torch's own, nor of those that take
several numbers from elsewhere than the outputs, unless these are only added, or are
targets as they were given: each sample has its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

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


Calls: TypeAlias = tuple[tuple[str, int], ...]


class LossForm(NamedTuple):
    """How the loss of a microbatch was computed.

    Args:
        weight: the microbatch's share of the step, to any scale.
        calls: the calls of torch from the loss back to the outputs, and how many
            numbers each has; none if the effect of one is not known.
        row: the weight, and what the calls divide and multiply by; a float64 tensor if
            one of them is on a device, and has not come to the host yet.
    """

    weight: float
    calls: Calls
    row: tuple[float, ...] | Tensor


def form_of(total: Tensor, outputs: Any, targets: Any, weight: float) -> LossForm:
    """Return how a loss was computed; the host waits for no device.

    Args:
        total: the loss, before its backward.
        outputs: what it was given; nothing is looked at behind these.
        targets: what else it was given.
        weight: the microbatch's share of the step, to any scale.
    """
    known, given = {x.grad_fn for x in tensors_in(outputs)}, tensors_in(targets)
    *_, nodes = graph_behind(total.grad_fn, known)
    try:
        numbers = [[_scalar(x) for x in _numbers(node, given)] for node in nodes]
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError):
        numbers, nodes = [], []  # or nothing was saved, or it has changed since
    row = _row([weight, *chain.from_iterable(numbers)], total.device)
    calls = zip([node.name() for node in nodes], map(len, numbers), strict=True)
    return LossForm(weight, tuple(calls), row)


def difference(forms: Sequence[LossForm]) -> str:
    """Describe how the losses of a step's microbatches differ in what they divide by.

    They do where one makes other calls; or where a number is neither the same for both
    nor in proportion to their weights, as one number at least must be.

    Args:
        forms: one for each microbatch, whose rows are read.
    """
    if len({(form.calls, form.row) for form in forms}) < 2:
        return ""
    counted = [(i, form) for i, form in enumerate(forms) if form.weight]
    for i, form in counted:
        begin, first = counted[0]
        if form.calls != first.calls:
            return f"microbatches {begin} and {i} are computed by other calls of torch"
    all_far = _far([form for _, form in counted], _NEAR)
    if not all_far.any():
        return ""
    for (i, form), is_far in zip(counted, all_far, strict=True):
        numbers = zip(first.row[1:], form.row[1:], is_far.tolist(), strict=True)
        if far := [(abs(a - b), a, b) for a, b, is_one in numbers if is_one]:
            _, a, b = max(far)
            return (
                f"a number in the loss of microbatch {begin}, what it divides by, is "
                f"{a:g}, and in that of microbatch {i} {b:g}"
            )
    return ""


def difference_on_device(forms: Sequence[LossForm]) -> Tensor | float | None:
    """Return NaN where `difference` will find one, else 0; the host does not wait.

    Where numbers hardly differ, it is 0, too: an update must not be left out for what
    the host does not find. None if only the host can compare them.

    Args:
        forms: one for each microbatch.
    """
    counted = [form for form in forms if form.weight]
    if len({form.calls for form in counted}) > 1:
        return math.nan
    if len({isinstance(form.row, Tensor) for form in counted}) > 1:
        return None
    return torch.where(_far(counted, 2 * _NEAR).any(), math.nan, 0.0)


def _far(forms: Sequence[LossForm], near: float) -> Tensor:
    """Return which numbers differ from those of the first form by more than they may.

    Args:
        forms: with the same calls.
        near: the relative difference that is rounding.
    """
    if not forms:
        return torch.zeros(0, 0, dtype=torch.bool)
    each = (torch.as_tensor(form.row, dtype=torch.float64) for form in forms)
    row_MN = torch.stack([*each])
    weight_M1, number_MN = row_MN[:, :1], row_MN[:, 1:]
    same_MN = number_MN[:1].expand_as(number_MN)
    scaled_MN = same_MN * (weight_M1 / weight_M1[:1])
    is_same, is_scaled = (
        torch.isclose(number_MN, x, rtol=near, atol=0.0) for x in (same_MN, scaled_MN)
    )
    return ~(is_scaled | (is_same & is_scaled.any(1, keepdim=True)))


def _scalar(x: float | Tensor) -> float | Tensor:
    """Return a number, as a tensor if it is on a device.

    Raises:
        ValueError: it has so few bits that equal ones may differ, or is complex.
    """
    if not isinstance(x, Tensor):
        return x
    is_rough = x.is_floating_point() and torch.finfo(x.dtype).eps > _NEAR
    if is_rough or x.is_complex():
        raise ValueError(x.dtype)
    return x.item() if x.device.type == "cpu" else x.detach()


def _row(
    numbers: Sequence[float | Tensor], device: torch.device
) -> tuple[float, ...] | Tensor:
    """Return numbers as the row of a `LossForm`."""
    if not any(isinstance(x, Tensor) for x in numbers):
        return tuple(map(float, numbers))
    # Unlike torch.tensor, torch.full copies nothing to a GPU.
    like = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(
        [
            x.to(like) if isinstance(x, Tensor) else torch.full_like(like, x)
            for x in numbers
        ]
    )


def _numbers(node: Any, given: Sequence[Tensor]) -> Iterator[Any]:
    """Yield what a call divides and multiplies by.

    A mask of booleans leaves out elements, and divides by nothing.

    Args:
        node: the call.
        given: the targets.

    Raises:
        ValueError: what it divides by is not known.
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
        elif not (source or value.dtype is torch.bool or _is_among(value, given)):
            raise ValueError(name)


def _is_among(value: Tensor, given: Sequence[Tensor]) -> bool:
    """Whether a tensor is one of those given: the same memory, seen in the same way."""
    alike = [x for x in given if (x.shape, x.stride()) == (value.shape, value.stride())]
    return any(x.data_ptr() == value.data_ptr() for x in alike)
