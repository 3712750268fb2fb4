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
        numbers: what they divide and multiply by; tensors on an accelerator, of
            float64, until the host has read them.
    """

    weight: float
    calls: tuple[str, ...] = ()
    numbers: Sequence[float | Tensor] = ()

    @property
    def unread(self) -> list[Tensor]:
        """The numbers that are still on an accelerator."""
        return [x for x in self.numbers if isinstance(x, Tensor)]

    def with_read(self, read: Iterator[float]) -> LossForm:
        """Return the form with the next of these numbers in place of those unread."""
        of = [next(read) if isinstance(x, Tensor) else x for x in self.numbers]
        return self._replace(numbers=of)


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
        if any(isinstance(x, Tensor) and _is_rough(x) for x in found):
            return LossForm(weight)
    except (AssertionError, AttributeError, RuntimeError, ValueError):
        return LossForm(weight)  # or nothing was saved, or it has changed since
    numbers = [
        x.detach().to(total.device, torch.float64, copy=True)
        if isinstance(x, Tensor) and x.device.type != "cpu"
        else float(x)
        for x in found
    ]
    return LossForm(weight, tuple(node.name() for node in nodes), numbers)


def difference(forms: Sequence[LossForm]) -> str:
    """Describe how the losses of a step's microbatches differ in what they divide by.

    They do where one makes other calls; or where a number is neither the same for both
    nor in proportion to their weights, as one number at least must be.

    Args:
        forms: of all microbatches; all numbers are read.
    """
    counted = [(i, form) for i, form in enumerate(forms) if form.weight]
    for i, form in counted:
        if not _are_alike(counted[0][1], form):
            begin = counted[0][0]
            return f"microbatches {begin} and {i} are computed by other calls of torch"
    rows = [
        torch.tensor([x.weight, *x.numbers], dtype=torch.float64) for _, x in counted
    ]
    for (i, _), row, is_far in zip(counted, rows, _far(rows, _NEAR), strict=True):
        if is_far.any():
            both = [x[1:][is_far] for x in (rows[0], row)]
            most = (both[0] - both[1]).abs().argmax()
            a, b = (float(x[most]) for x in both)
            return (
                f"a number in the loss of microbatch {counted[0][0]}, what it divides "
                f"by, is {a:g}, and in that of microbatch {i} {b:g}"
            )
    return ""


def difference_on_device(forms: Sequence[LossForm]) -> Tensor | float:
    """Return NaN where `difference` will find one, else 0; the host does not wait.

    Where numbers hardly differ, it is 0, too: an update must not be left out for what
    the host does not find.

    Args:
        forms: of all microbatches; numbers may be unread.
    """
    counted = [form for form in forms if form.weight]
    unread = [x for form in counted for x in form.unread]
    if not unread or not all(_are_alike(counted[0], form) for form in counted):
        return math.nan if difference(counted) else 0.0

    def here(x: float | Tensor) -> Tensor:
        return x if isinstance(x, Tensor) else torch.full_like(unread[0], x)

    rows = [torch.stack([*map(here, (x.weight, *x.numbers))]) for x in counted]
    return torch.where(_far(rows, 2 * _NEAR).any(), math.nan, 0.0)


def _are_alike(a: LossForm, b: LossForm) -> bool:
    return a.calls == b.calls and len(a.numbers) == len(b.numbers)


def _far(rows: Sequence[Tensor], near: float) -> Tensor:
    """Return which numbers differ from those of the first row by more than they may.

    Args:
        rows: a weight, and the numbers of its microbatch; float64.
        near: the relative difference that is rounding.
    """
    if not rows:
        return torch.zeros(0, 0, dtype=torch.bool)
    all_MN = torch.stack([*rows])
    first_N, weight_M1 = all_MN[:1, 1:], all_MN[:, :1]
    scaled_MN = first_N * (weight_M1 / weight_M1[:1])
    is_scaled, is_same = (
        torch.isclose(all_MN[:, 1:], x.expand_as(scaled_MN), rtol=near, atol=0.0)
        for x in (scaled_MN, first_N)
    )
    return ~(is_scaled | (is_same & is_scaled.any(1, keepdim=True)))


def _is_rough(x: Tensor) -> bool:
    """Return whether a number has so few bits that equal ones may differ."""
    return x.is_floating_point() and torch.finfo(x.dtype).eps > _NEAR


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
