"""Computes the losses of a net's last stage, and checks some of them.

Reads the losses of a step's microbatches, and checks that they are finite.

On a CPU a loss is there when its forward has returned, and is read at once. Reading one
from an accelerator waits for all queued work and leaves the device idle meanwhile:
there the losses are copied together when the step's last forward is queued, and the
host waits for the copy when backwards are queued behind it.

    CPU            F0 read  B0   F1 read  B1   F2 read        B2         U
    accelerator    F0       B0   F1       B1   F2 copy all    B2   wait  U
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

import torch
from torch import Tensor

from hocket.errors import NonFiniteError
from hocket.model.stages.discard_saved_tensors import keep_saved_tensors
from hocket.run.data.batch import Microbatch
from hocket.run.data.loss import TOTAL, LossFunction, losses_of
from hocket.run.data.token_mean import zero_losses
from hocket.run.device.copies import Copies, CopyEvent, copies_of
from hocket.run.stage.loss_checks.reads import LossReads
from hocket.run.stage.loss_checks.step_loss_check import StepLossCheck
from hocket.run.stage.net_output import NetOutput
from hocket.run.stage.precision import Precision


class StageLoss:
    """Computes losses and keeps their values; a stage may have none.

    Args:
        stage: the stage's number in the program.
        function: the loss of each microbatch; None if the stage has none.
        device: the outputs' device.
        precision: the type that losses compute in.
        checks: whether the loss must be a mean over samples, for each microbatch is
            only a part of the batch.
        recomputes: whether forwards that keep values save nothing for a backward.

    Attributes:
        function: see above.
        batch_function: the loss over the whole batch, on a net's last stage.
        others: the outputs of other nets that either loss reads.
        values: the losses of the forwards since they were last read.
        reads: looks at what the losses read, where the uncut model is known.
    """

    def __init__(
        self,
        stage: int,
        function: LossFunction | None,
        device: torch.device,
        precision: Precision,
        *,
        checks: bool,
        recomputes: bool = False,
    ) -> None:
        self.function = function
        self.batch_function: LossFunction | None = None
        self.others: Sequence[NetOutput] = ()
        self.values = LossValues(stage, copies_of(device))
        self.reads: LossReads | None = None
        self._recomputes = recomputes
        self._losses_of = precision.computing(device, losses_of)
        self._step_check = (
            StepLossCheck(function, self._together, device)
            if checks and function is not None
            else None
        )

    def named(self, output: Any, targets: Any, *others: Any) -> dict[str, Tensor]:
        """Return the named losses of the model's output.

        Args:
            output: the model's output.
            targets: the loss's targets.
            others: outputs of other nets.
        """
        function = self.function or self.batch_function
        assert function is not None
        given = (function, output, targets, *others)
        if self.reads is None or not self.reads.is_on:
            return self._losses_of(*given)
        return self.reads.losses(self._losses_of, *given)

    def total(
        self,
        outputs: tuple[Any, ...],
        microbatch: Microbatch,
        now: tuple[int, int] | None,
        *,
        weight: float,
    ) -> Tensor:
        """Return the loss to train of one microbatch.

        Args:
            outputs: the model's, and those of other nets.
            microbatch: has the targets.
            now: the step and microbatch for which values are kept; None when the
                forward runs once more.
            weight: the microbatch's share of the step, to any scale; 0 if none of its
                targets counts: then all losses are 0.

        Raises:
            ModelError: the loss is no scalar, or no mean over samples.
            NonFiniteError: the loss is not a finite number, and is read at once.
        """
        check = None if now is None else self._step_check
        # What the loss has saved says what it divides by.
        with keep_saved_tensors() if check and self._recomputes else nullcontext():
            named = self.named(outputs[0], microbatch.targets, *outputs[1:])
        numbers: Sequence[Tensor] = ()
        if now is not None and check is not None:
            numbers = check.keep(now[0], named[TOTAL], outputs, microbatch, weight)
        if not weight:
            named = zero_losses(named, outputs)
        if now is not None:
            self.values.take(*now, named, numbers)
        return named[TOTAL]

    def is_compared_whole(self, step: int) -> bool:
        """Return whether the host waits for a step, to compare its losses."""
        return self._step_check is not None and self._step_check.is_kept(step)

    def sum_on_device(self, step: int) -> Tensor:
        """Return the sum of a step's losses to train, which are being copied.

        It is not finite if one of them is not, or if `compare` will refuse them; the
        host does not wait for it.
        """
        total = self.values.sum_on_device(step)
        if self._step_check is None:
            return total
        return total + self._step_check.difference_on_device(step)

    def compare(self, step: int) -> None:
        """Compare a step's losses, which were read, with their joint loss.

        Raises:
            ModelError: they are not that of the batch.
        """
        if self._step_check is not None:
            self._step_check.compare(step, self.values.numbers.pop(step, ()))

    def _together(self, outputs: Sequence[Any], targets: Any) -> dict[str, Tensor]:
        """Return the losses of the model's output and those of other nets."""
        return self.named(outputs[0], targets, *outputs[1:])


_NAN_HINT: Final = (
    ". If all targets of it are ignored, their mean is nan: hocket.TokenMean(loss) "
    "leaves such microbatches out"
)


@dataclass(frozen=True, slots=True)
class _Copied:
    """Losses on their way to the host.

    Args:
        losses: named losses on the device, by step and microbatch.
        numbers: what was taken with them, by step.
        host: their values, one after the other, once they have arrived.
        event: the event behind the copy.
    """

    losses: dict[tuple[int, int], dict[str, Tensor]]
    numbers: dict[int, list[Tensor]]
    host: Tensor
    event: CopyEvent

    def is_of(self, step: int | None) -> bool:
        """Whether there are losses of a step among them; None for any step."""
        return step is None or any(of_step == step for of_step, _ in self.losses)


@dataclass(eq=False)
class LossValues:
    """Keeps the named losses of each microbatch, and reads their values.

    Args:
        stage: the stage that computes them, for errors.
        copies: copies the losses to the host; None on a CPU, where each is read when it
            is taken.

    Attributes:
        outcome: what an error says of the step's update.
        numbers: what was taken with losses that were read, by step.
    """

    stage: int
    copies: Copies | None

    def __post_init__(self) -> None:
        """Begin without losses."""
        self.outcome = "no weights were updated from it"
        self.numbers: dict[int, list[float]] = {}
        self._unread: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._unread_numbers: dict[int, list[Tensor]] = {}
        self._copied: list[_Copied] = []
        self._values: dict[int, dict[int, dict[str, float]]] = {}  # by step

    def take(
        self,
        step: int,
        index: int,
        named: Mapping[str, Tensor],
        numbers: Sequence[Tensor] = (),
    ) -> None:
        """Keep the losses of one microbatch.

        Args:
            step: the step.
            index: the microbatch.
            named: its losses.
            numbers: scalars of float64 that come to the host with them; none on a CPU.

        Raises:
            NonFiniteError: the loss to train is not finite, and is read at once.
        """
        if self.copies is None:
            values = {name: value.item() for name, value in named.items()}
            self._keep(step, index, values)
            return
        # Copies: some losses share memory with what they are the mean of. Of one type:
        # they are stacked later.
        self._unread[step, index] = {
            name: value.detach().to(torch.float64, copy=True)
            for name, value in named.items()
        }
        self._unread_numbers.setdefault(step, []).extend(numbers)

    def begin_read(self) -> None:
        """Begin to copy all losses to the host, behind the work queued so far."""
        copies, unread, numbers = self.copies, self._unread, self._unread_numbers
        if copies is None or not unread:
            return
        self._unread, self._unread_numbers = {}, {}
        of_all = (*(x.values() for x in unread.values()), *numbers.values())
        scalars = torch.stack([*chain.from_iterable(of_all)])
        host = torch.empty(len(scalars), dtype=scalars.dtype, pin_memory=copies.pins)
        event = copies.to_host((host,), (scalars,))
        self._copied.append(_Copied(unread, numbers, host, event))

    @property
    def is_read(self) -> bool:
        """Whether `read` would not wait."""
        return not self._unread and all(x.event.query() for x in self._copied)

    def read(self, step: int | None = None) -> dict[int, dict[str, float]]:
        """Return what was taken by microbatch and name, and forget it.

        Args:
            step: the step to read; None for all, where of two losses of one microbatch
                the last step's is returned.

        Raises:
            NonFiniteError: the loss to train is not finite for a microbatch; names the
                first.
        """
        if step is None or any(of_step == step for of_step, _ in self._unread):
            self.begin_read()
        due = [copy for copy in self._copied if copy.is_of(step)]
        self._copied = [copy for copy in self._copied if not copy.is_of(step)]
        for copy in due:
            copy.event.synchronize()
            read = iter(copy.host.tolist())
            for (of_step, index), named in copy.losses.items():
                self._keep(of_step, index, {name: next(read) for name in named})
            for of_step, unread in copy.numbers.items():
                self.numbers.setdefault(of_step, []).extend(islice(read, len(unread)))
        if step is not None:
            return self._values.pop(step, {})
        values, self._values = self._values, {}
        return {i: named for of_step in values.values() for i, named in of_step.items()}

    def sum_on_device(self, step: int) -> Tensor:
        """Return the sum of a step's losses to train, which are being copied.

        It is not finite if one of them is not; the host does not wait for it.
        """
        totals = [
            named[TOTAL]
            for copy in self._copied
            for (of_step, _), named in copy.losses.items()
            if of_step == step
        ]
        return torch.stack(totals).sum()

    def clear(self) -> None:
        """Drop the losses that were kept."""
        self._unread.clear()
        self._unread_numbers.clear()
        self._copied.clear()
        self.numbers.clear()
        self._values.clear()

    def _keep(self, step: int, index: int, values: dict[str, float]) -> None:
        total = values[TOTAL]
        if not math.isfinite(total):
            raise NonFiniteError(
                f"the loss is {total} at step {step}, stage {self.stage}, "
                f"microbatch {index}; {self.outcome}"
                f"{_NAN_HINT if math.isnan(total) else ''}"
            )
        self._values.setdefault(step, {})[index] = values
