"""Compares a step's loss with the loss of its microbatches together.

After the forwards of the first step, and of the 10th, 100th, ..., the gradient that is
trained (the mean over microbatches) is compared with the gradient of the loss over all
of them: a difference is an error, with its size. In the steps between, too, unless the
loss is computed as in a step that was compared: then only the numbers are compared that
it divides by (`divisors.py`), which costs next to nothing. On an accelerator these come
to the host with the losses, and the device itself can leave the update out meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.errors import ModelError
from hocket.model.trace.per_sample import tensors_in
from hocket.run.data.batch import Microbatch, joined
from hocket.run.data.loss import (
    LossFunction,
    PerMicrobatch,
    TokenMean,
    count_of,
    counts_itself,
)
from hocket.run.stage.loss_checks import divisors
from hocket.run.stage.loss_checks.trial import LossTrial, restored_attributes
from hocket.run.stage.seed import preserve_generators, seed_generators

# Detects losses that compare samples with each other, before training starts.
#
# A pipeline computes the loss of each microbatch, and adds these up by samples. That is
# the batch's loss if the loss is a mean over samples. One that compares them
# (contrastive losses, statistics of the batch) is another one then, which depends on
# how many microbatches there are:
#
#     CLIP's loss of 8 samples               each of 8 against 7 others
#     mean of its losses of 4 and 4 samples  each of 8 against 3 others
#
# They are distinguished by some samples and the same samples twice:
#
#     loss                                  a, b       a, b, a, b
#     mean over samples, words, weights     (a+b)/2    the same
#     mean over words that are not padding  the same, for each word is there twice
#     sum over samples                      a+b        twice as much
#     compares samples                      against 1  against 3
#
# so that a weighted mean passes, also over classes with weights or over the words of
# uneven sentences (`ignore_index`). `step_loss_check.py` then compares the gradients of
# the microbatches, and finds what this does not show.


_MOST: Final = 4  # samples that are tried


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
    trial = LossTrial(named, output, targets, num_samples)
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


def _is_near(a: Tensor, b: Tensor) -> bool:
    """Return whether two losses differ by no more than rounding."""
    least = math.sqrt(torch.finfo(a.dtype).eps)
    return bool((a - b).abs() <= least * torch.maximum(a.abs(), b.abs()))


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


# The relative difference of gradients that is no rounding: computed in more bits than
# the outputs have, and in those that they have.
_LEAST: Final = 1e-5
_LEAST_IN_OWN: Final = 1e-3
_FIRST_TYPE: Final = torch.float64  # that is tried
_Kept: TypeAlias = list[tuple[Any, Any, int]]  # outputs, targets, samples
_FEW: Final = 4  # samples of a microbatch that is too large to be kept


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
    room_bytes: int = 2**27  # for outputs and targets of a step, in the first type
    _first: int | None = None  # the first step
    _forms: dict[int, list[divisors.LossForm]] = field(default_factory=dict)
    _kept: dict[int, _Kept] = field(default_factory=dict)
    _left_bytes: int = 0
    _compared: set[divisors.Calls] = field(default_factory=set)
    _varies: bool = False  # whether it is right although it divides by other numbers
    _draws: bool = False  # whether it draws random numbers

    def keep(
        self, step: int, total: Tensor, output: Any, part: Microbatch, weight: float
    ) -> Tensor | None:
        """Copy what the loss of a microbatch reads; the first microbatches are enough.

        Of one that is too large, some samples are.

        Args:
            step: the step; one whose loss is known to be a mean is not compared.
            total: the loss of the microbatch, before its backward.
            output: the model's output.
            part: the microbatch.
            weight: its share of the step, to any scale.

        Returns:
            The row of its `LossForm` if it is on a device: it comes to `compare` by way
            of the host.

        Raises:
            ModelError: the first loss of all is no mean over samples.
        """
        if isinstance(self.loss, PerMicrobatch):
            return None
        form = divisors.form_of(total, output, part.targets, weight)
        if self._first is None:
            self._first, given = step, (output, part.targets, part.num_samples)
            check_mean(self.loss, self.named, *given, device=self.device)
        forms = self._forms.setdefault(step, [])
        forms.append(form)
        is_due = str(step - self._first + 1).rstrip("0") == "1"
        is_new = self._varies or form.calls not in self._compared
        if len(forms) == 1 and (is_due or (is_new and not self._draws)):
            self._kept[step], self._left_bytes = [], self.room_bytes
        if step in self._kept:
            few = _FEW if is_due and len(forms) == 1 else 0
            self._copy(self._kept[step], output, part, few)
        return form.row if isinstance(form.row, Tensor) else None

    def _copy(self, kept: _Kept, output: Any, part: Microbatch, few: int) -> None:
        """Copy a microbatch; of one that does not fit, so few samples."""
        targets, num = part.targets, part.num_samples
        size = sum(x.numel() for x in tensors_in((output, targets)))
        self._left_bytes -= size * _FIRST_TYPE.itemsize
        rows = torch.arange(num if self._left_bytes >= 0 else min(few, num))
        trial = LossTrial(self.named, output, targets, num, has_blocks=True)
        with suppress(ValueError), torch.no_grad():
            if len(rows):
                both = trial.taken(output, rows), trial.taken(targets, rows)
                kept.append((*both, len(rows)))

    def difference_on_device(self, step: int) -> Tensor | float | None:
        """Return NaN where `compare` will refuse a step, else 0.

        None if the host must wait for it, as it is compared whole.
        """
        if step in self._kept:
            return None
        forms = () if self._draws else self._forms.get(step, ())
        return divisors.difference_on_device(forms)

    def compare(self, step: int, rows: Sequence[Tensor]) -> None:
        """Compare what was kept of a step.

        Args:
            step: the step.
            rows: what `keep` has returned of it, on the host.

        Raises:
            ModelError: there is a difference; gives its size and the way out.
        """
        kept, early = self._kept.pop(step, None), self._forms.pop(step, [])
        late = (tuple(row.tolist()) for row in rows)
        forms = [
            form._replace(row=next(late)) if isinstance(form.row, Tensor) else form
            for form in early
        ]
        differing, text, num_compared = divisors.difference(forms), None, 0
        if kept:
            num, num_samples = len(kept), sum(size for *_, size in kept)
            trial, parts = self._joined(kept)
            with preserve_generators(self.device), restored_attributes(self.loss):
                text = self._difference(trial, parts)
            is_whole = trial.num_samples == num_samples
            num_compared = num if is_whole and text is not None else 0
        if differing and not text and num_compared < len(forms) and not self._draws:
            text = f"not that of the batch: {differing}"
        if text:
            is_counted = isinstance(self.loss, TokenMean)
            way_out = _WRONG_COUNT if is_counted else _way_out(self.loss)
            raise ModelError(f"the gradient of step {step} is {text}. {way_out}")
        if kept is not None:
            self._compared.update(form.calls for form in forms if form.calls)
            self._varies = self._varies or bool(differing)

    def _joined(self, kept: _Kept) -> tuple[LossTrial, Sequence[Tensor]]:
        """Return all microbatches together, and the rows of each; keep no others.

        Where shapes differ between microbatches, it is the first one, cut in two.
        """
        outputs, targets, sizes = zip(*kept, strict=True)
        kept.clear()
        try:
            both = joined(outputs), joined(targets)
        except (ModelError, RuntimeError):
            both, sizes = (outputs[0], targets[0]), sizes[:1]
        rows = torch.arange(sum(sizes))
        parts = rows.split(sizes) if len(sizes) > 1 else rows.tensor_split(2)
        has_blocks = len(sizes) > 1 and not _share_a_leaf(outputs[:2])
        return LossTrial(self.named, *both, len(rows), has_blocks), parts

    def _difference(self, trial: LossTrial, parts: Sequence[Tensor]) -> str | None:
        """Describe by how much the mean over parts is off.

        Returns:
            Nothing if it is not; None if that cannot be said.
        """
        rows = torch.cat(list(parts))
        seed_generators(self.device, 0)
        tried = trial.in_first_type(rows, (_FIRST_TYPE, torch.float32, None))
        if tried is None:
            return None
        value, dtype = tried
        seed_generators(self.device, 1)
        whole = trial.with_gradients(rows, dtype)
        self._draws = whole is None or not torch.equal(whole.value, value)
        if whole is None or self._draws:
            return None
        counts = [
            count_of(self.loss, Microbatch((), trial.taken(trial.targets, x), len(x)))
            for x in parts
        ]
        size = math.hypot(*map(Tensor.norm, whole.grads))
        mean, left = 0.0, [grad.clone() for grad in whole.grads]
        del whole
        for own, count in zip(parts, counts, strict=True):
            if not count:
                continue
            part, share = trial.with_gradients(own, dtype), count / sum(counts)
            if part is None:
                return None
            mean += share * float(part.value)
            for grad, more in zip(left, part.grads, strict=True):
                grad[trial.rows_of(len(grad), own).to(grad.device)] -= share * more
        off = math.hypot(*map(Tensor.norm, left))
        if off <= (_LEAST if dtype else _LEAST_IN_OWN) * size:
            return ""
        how = f"{off / size:.1%} off" if size else f"{off:.3g}, and not 0"
        return (
            f"{how}: what is trained is {mean:.6g}, the mean over microbatches of "
            f"their losses, and the loss of these {len(rows)} samples together is "
            f"{float(value):.6g}"
        )


def refuse_changes(step: int, versions: Sequence[int], *given: Any) -> None:
    """Refuse a loss that has changed in place what it was given.

    Args:
        step: the step.
        versions: the `versions_of` it before.
        given: the outputs and targets.

    Raises:
        ModelError: it has.
    """
    if versions_of(*given) != versions:
        raise ModelError(
            f"in step {step}, the loss changes its outputs or targets in place: they "
            "are those of a microbatch, or copies, where in a plain loop the batch's "
            "own change, all samples together. Let it change a copy of them, such as "
            "targets.clone()"
        )


def versions_of(*given: Any) -> list[int]:
    """Return what differs when a tensor or an array was changed in place.

    Of tensors that is torch's count of changes, of arrays a digest.
    """
    found: list[int] = []
    for one in given:
        found += [0 if x.is_inference() else x._version for x in tensors_in(one)]
        if not isinstance(one, Tensor):
            leaves = pytree.tree_leaves(one)
            found += [crc32(x.tobytes()) for x in leaves if isinstance(x, np.ndarray)]
    return found


def _share_a_leaf(outputs: Sequence[Any]) -> bool:
    """Return whether two outputs have a leaf in common, whose rows are no samples."""
    first, second = map(tensors_in, outputs)
    return any(map(torch.equal, first, second))


def _way_out(loss: LossFunction) -> str:
    how = "(loss)"
    if not counts_itself(loss):
        how = "(loss, count=count), where count(targets) returns what it is divided by"
    return (
        "The loss divides by another number in each microbatch, as with ignore_index "
        "or class weights, or it compares samples. To train the loss of the whole "
        f"batch, take loss=hocket.TokenMean{how}; or loss=hocket.WholeBatch(loss) if "
        "it compares samples. If the mean over microbatches is meant, declare it: "
        "loss=hocket.PerMicrobatch(loss)"
    )


_WRONG_COUNT: Final = (
    "So count(targets) of TokenMean is not what the loss divides by: return the number "
    "of targets that the loss reads, or the sum of their class weights"
)
