"""Detects losses that compare samples with each other, before training starts.

A pipeline computes the loss of each microbatch, and adds these up by samples. That is
the batch's loss if the loss is a mean over samples. One that compares them (contrastive
losses, statistics of the batch) is another one then, which depends on how many
microbatches there are:

    CLIP's loss of 8 samples               each of 8 against 7 others
    mean of its losses of 4 and 4 samples  each of 8 against 3 others

They are distinguished by some samples and the same samples twice:

    loss                                  a, b       a, b, a, b
    mean over samples, words, weights     (a+b)/2    the same
    mean over words that are not padding  the same, for each word is there twice
    sum over samples                      a+b        twice as much
    compares samples                      against 1  against 3

and then by the gradients of samples while the others of the microbatch, and their
number, are exchanged (`loss_parts.py`). So a weighted mean passes, also over classes
with weights or over the words of uneven sentences (`ignore_index`): there,
microbatches' means add up to nearly the batch's, and exactly with `TokenMean`.

What is refused is proved to be no weighted mean, with these samples. What passes is not
proved to be one: samples may be compared in a way that these few outputs do not show.

After the forwards of the first step, the loss of its microbatches together is compared
with the mean of theirs, which is trained: a difference is a warning, with its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import ModelError
from hocket.model.capture.attribute_writes import preserve_attributes
from hocket.model.trace.per_sample import num_rows, take_rows, tensors_in
from hocket.run.data.batch import Microbatch
from hocket.run.data.join import joined
from hocket.run.data.loss import TOTAL, LossFunction
from hocket.run.data.token_mean import TokenMean, count_of, counts_itself
from hocket.run.stage.loss_parts import LossOfRows, is_mean_of_parts, two_parts
from hocket.run.stage.seed import preserve_generators, seed_generators

_MOST: Final = 4  # samples that are tried
_LEAST: Final = 1e-3  # the relative difference of gradients that is worth a warning


@dataclass(frozen=True, slots=True)
class PerMicrobatch:
    """Declares that a loss which compares samples is meant within microbatches.

    Args:
        loss: the loss function, as for `Pipeline`.
    """

    loss: LossFunction

    def __call__(self, output: Any, targets: Any) -> Tensor | Mapping[str, Tensor]:
        """Compute the loss."""
        return self.loss(output, targets)


class InexactLossWarning(UserWarning):
    """What is trained differs from the loss of the whole batch."""


@dataclass(slots=True)
class StepLossCheck:
    """Compares the gradient that is trained with that of the microbatches together.

    It is that of the loss in the model's outputs. Losses that cannot be tried, or draw
    random numbers, are not compared. A single microbatch is cut in two.

    Args:
        loss: the user's loss function.
        named: computes the named losses of outputs and targets.
        device: the outputs' device.
    """

    loss: LossFunction
    named: Callable[[Any, Any], Mapping[str, Tensor]]
    device: torch.device
    _kept: list[tuple[Any, Any, int]] = field(default_factory=list)
    _room_bytes: int = 2**27  # for outputs and targets

    def keep(self, output: Any, targets: Any, num_samples: int) -> None:
        """Copy what the loss of a microbatch reads; the first microbatches are enough.

        Args:
            output: the model's output.
            targets: the targets of that microbatch.
            num_samples: samples of that microbatch.
        """
        self._room_bytes -= sum(x.nbytes for x in tensors_in((output, targets)))
        if self._room_bytes < 0 or isinstance(self.loss, PerMicrobatch):
            return
        trial = _LossTrial(self.named, output, targets, num_samples)
        rows = torch.arange(num_samples)
        with suppress(ValueError), torch.no_grad():
            both = trial.taken(output, rows), trial.taken(targets, rows)
            self._kept.append((*both, num_samples))

    def compare(self) -> str:
        """Compare what was kept.

        Returns:
            A warning with the size of the difference; empty if there is none.

        Raises:
            ModelError: a `TokenMean` counts otherwise than its loss.
        """
        if not self._kept:
            return ""
        with preserve_generators(self.device), restored_attributes(self.loss):
            text = self._difference(*self._joined())
        if text and isinstance(self.loss, TokenMean):
            raise ModelError(f"{text}. {_WRONG_COUNT}")
        return f"{text}. {_way_out(self.loss)}" if text else ""

    def _joined(self) -> tuple[_LossTrial, Sequence[Tensor]]:
        """Return all microbatches together, and the rows of each.

        Where shapes differ between microbatches, it is the first one, cut in two.
        """
        outputs, targets, sizes = zip(*self._kept, strict=True)
        try:
            both = joined(outputs), joined(targets)
        except (ModelError, RuntimeError):
            both, sizes = (outputs[0], targets[0]), sizes[:1]
        rows = torch.arange(sum(sizes))
        parts = rows.split(sizes) if len(sizes) > 1 else rows.tensor_split(2)
        return _LossTrial(self.named, *both, len(rows)), parts

    def _difference(self, trial: _LossTrial, parts: Sequence[Tensor]) -> str:
        """Describe by how much the mean over parts is off; empty if it is not."""
        rows = torch.cat(list(parts))
        seed_generators(self.device, 0)
        tried = trial.in_first_type(rows, (torch.float32, torch.float64, None))
        if tried is None:
            return ""
        whole, dtype = tried
        seed_generators(self.device, 1)
        again = trial.with_gradients(rows, dtype)
        if again is None or not torch.equal(again.value, whole.value):
            return ""  # it draws random numbers
        counts = [
            count_of(self.loss, Microbatch((), trial.taken(trial.targets, x), len(x)))
            for x in parts
        ]
        mean, left = 0.0, [grad.clone() for grad in whole.grads]
        for own, count in zip(parts, counts, strict=True):
            if not count:
                continue
            part, share = trial.with_gradients(own, dtype), count / sum(counts)
            if part is None:
                return ""
            mean += share * float(part.value)
            for grad, more in zip(left, part.grads, strict=True):
                grad[own.to(grad.device)] -= share * more
        size, off = (math.hypot(*map(Tensor.norm, x)) for x in (whole.grads, left))
        if off <= _LEAST * size:
            return ""
        how = f"{off / size:.1%} off" if size else f"{off:.3g}, and not 0"
        return (
            f"the gradient of the first step is {how}: what is trained "
            f"is {mean:.6g}, the mean over microbatches of their losses, and the loss "
            f"of these {len(rows)} samples together is {float(whole.value):.6g}"
        )


def check_mean(
    loss: LossFunction,
    named: Callable[[Any, Any], Mapping[str, Tensor]],
    output: Any,
    targets: Any,
    num_samples: int,
    *,
    device: torch.device,
) -> None:
    """Refuse a loss that is no mean over samples.

    Losses that cannot be tried are accepted: outputs whose first dimension is not
    the samples', losses that draw random numbers or depend on the order of samples,
    and those that do not run with other numbers of samples.

    Args:
        loss: the user's loss function.
        named: computes the named losses of outputs and targets.
        output: the model's output for one microbatch.
        targets: the targets of that microbatch.
        num_samples: samples of that microbatch.
        device: the outputs' device.

    Raises:
        ModelError: it compares samples with each other, or is a sum; names the numbers.
    """
    if isinstance(loss, PerMicrobatch):
        return
    num = min(num_samples, _MOST)
    rows = torch.arange(num)
    trial = _LossTrial(named, output, targets, num_samples)
    parts = None
    with preserve_generators(device), restored_attributes(loss), torch.no_grad():
        seed_generators(device, 0)
        once = trial.loss_of(rows)
        twice = trial.loss_of(torch.cat([rows, rows]))
        seed_generators(device, 1)
        backwards = trial.loss_of(rows.flip(0))
        if once is None or twice is None or backwards is None:
            return
        if not _is_near(once, backwards):
            return
        if not _is_near(once, twice):
            raise ModelError(_text(_as_often(once, twice, num)))
        parts = _no_mean(trial, num)
    if parts is not None:
        raise ModelError(_text(parts))


def _no_mean(trial: _LossTrial, num: int) -> str | None:
    """Return how the loss differs from a mean over its samples' parts, if it does."""
    types = torch.float64, torch.float32, None
    tried = trial.in_first_type(torch.arange(num), types)
    if tried is None:
        return None
    whole, dtype = tried
    for rows in two_parts(num):
        parts = [trial.with_gradients(own, dtype) for own in rows]
        known = [part for part in parts if part is not None]
        if len(known) == 2 and not is_mean_of_parts(whole, known, rows):
            first, second = (f"{part.value.item():.6g}" for part in known)
            return (
                f"loss(output, targets) of {num} samples is {whole.value.item():.6g}, "
                f"of {len(rows[0])} of them {first}, and of the other {len(rows[1])} "
                f"{second}: by its gradients it is no mean of both. It is a function "
                "of a mean, or "
            )
    return None


@contextmanager
def restored_attributes(loss: LossFunction) -> Iterator[None]:
    """Restore the attributes of a loss that is a module."""
    loss = loss.loss if isinstance(loss, TokenMean) else loss
    if not isinstance(loss, nn.Module):
        yield
        return
    before = [(buffer, buffer.detach().clone()) for buffer in loss.buffers()]
    try:
        with preserve_attributes(loss):
            yield
    finally:
        for buffer, value in before:
            # Writing an equal buffer would invalidate saved tensors.
            if not torch.equal(buffer, value):
                buffer.detach().copy_(value)


@dataclass(frozen=True, slots=True)
class _LossTrial:
    """Computes the loss of some of a microbatch's samples."""

    named: Callable[[Any, Any], Mapping[str, Tensor]]
    output: Any
    targets: Any
    num_samples: int

    def loss_of(self, rows: Tensor) -> Tensor | None:
        """Return the loss of these samples; None if it cannot be computed."""
        try:
            output, targets = self.taken(self.output, rows), self.targets
            value = self.named(output, self.taken(targets, rows))[TOTAL]
        except Exception:
            return None
        return value if bool(value.isfinite()) else None

    def with_gradients(
        self, rows: Tensor, dtype: torch.dtype | None
    ) -> LossOfRows | None:
        """Return the loss of these samples, and its gradients in the output's leaves.

        Args:
            rows: the samples.
            dtype: the type to compute in; the output's own when None.

        Returns:
            The loss; None if it cannot be computed so.
        """

        def converted(leaf: Any) -> Any:
            is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf.detach().to(dtype or leaf.dtype) if is_float else leaf

        try:
            given = pytree.tree_map(converted, self.taken(self.output, rows))
            targets = pytree.tree_map(converted, self.taken(self.targets, rows))
            wanted = [
                leaf.requires_grad_()
                for leaf in pytree.tree_leaves(given)
                if isinstance(leaf, Tensor) and leaf.dim() and leaf.is_floating_point()
            ]
            with torch.enable_grad():
                value = self.named(given, targets)[TOTAL]
            grads: Sequence[Tensor] = [torch.zeros_like(leaf) for leaf in wanted]
            if value.requires_grad and wanted:
                grads = torch.autograd.grad(
                    value, wanted, allow_unused=True, materialize_grads=True
                )
        except Exception:
            return None
        is_finite = all(bool(x.isfinite().all()) for x in (value, *grads))
        return LossOfRows(value.detach(), grads) if is_finite else None

    def in_first_type(
        self, rows: Tensor, types: Sequence[torch.dtype | None]
    ) -> tuple[LossOfRows, torch.dtype | None] | None:
        """Do what `with_gradients` does, in the first type in which it runs."""
        for dtype in types:
            found = self.with_gradients(rows, dtype)
            if found is not None:
                return found, dtype
        return None

    def taken(self, structure: Any, rows: Tensor) -> Any:
        """Return the rows of every leaf that has samples.

        Raises:
            ValueError: a leaf's first dimension is not the samples'.
        """

        def taken(leaf: Any) -> Any:
            found = num_rows(leaf)
            if found is None:
                return leaf
            if found != self.num_samples:
                raise ValueError(found)
            return take_rows(leaf, rows)

        return pytree.tree_map(taken, structure)


def _is_near(a: Tensor, b: Tensor) -> bool:
    """Return whether two losses differ by no more than rounding."""
    least = math.sqrt(torch.finfo(a.dtype).eps)
    return bool((a - b).abs() <= least * torch.maximum(a.abs(), b.abs()))


def _way_out(loss: LossFunction) -> str:
    how = "(loss)"
    if not counts_itself(loss):
        how = "(loss, count=count), where count(targets) returns what it is divided by"
    return (
        "The loss divides by another number in each microbatch, as with ignore_index "
        "or class weights, or it compares samples. To train the loss of the whole "
        f"batch, take loss=hocket.TokenMean{how}; or loss=hocket.WholeBatch(loss) if "
        "it compares samples. If this is meant, take loss=hocket.PerMicrobatch(loss)"
    )


_WRONG_COUNT: Final = (
    "So count(targets) of TokenMean is not what the loss divides by: return the number "
    "of targets that the loss reads, or the sum of their class weights"
)


def _as_often(once: Tensor, twice: Tensor, num: int) -> str:
    """Describe a loss that changes when all samples are there twice."""
    samples = "1 sample" if num == 1 else f"{num} samples"
    numbers = (
        f"loss(output, targets) of {samples} is {once.item():.6g}, and of the same "
        f"{samples} twice {twice.item():.6g}: it "
    )
    is_sum = _is_near(2 * once, twice)
    return f"{numbers}is a sum over samples, or " if is_sum else numbers


def _text(numbers: str) -> str:
    return (
        f"{numbers}compares samples with each other. A pipeline computes it "
        "for each microbatch by itself, which is not the loss of the whole batch. "
        "Return the mean of what each sample costs for itself; or have it computed "
        "over the batch, with all microbatches alive at once: "
        "loss=hocket.WholeBatch(loss); or leave the batch "
        "whole (num_microbatches=1, num_replicas=1, accumulate=1); or, if it is "
        "enough to compare the samples of one microbatch, declare it: "
        "loss=hocket.PerMicrobatch(loss)"
    )
