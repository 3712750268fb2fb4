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
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from hocket.errors import NonFiniteError
from hocket.run.data.batch import Microbatch
from hocket.run.data.loss import TOTAL, LossFunction, losses_of, zero_losses
from hocket.run.device.copies import Copies, CopyEvent, copies_of
from hocket.run.stage.loss_checks.reads import LossReads
from hocket.run.stage.loss_checks.step_loss_check import (
    StepLossCheck,
    refuse_changes,
    versions_of,
)
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

    Attributes:
        function: see above.
        batch_function: the loss over the whole batch, on a net's last stage.
        others: the outputs of other nets that either loss reads.
        owns_batch: whether the loss is given the batch itself, and may change it.
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
    ) -> None:
        self.function = function
        self.batch_function: LossFunction | None = None
        self.others: Sequence[NetOutput] = ()
        self.owns_batch = True
        self.values = LossValues(stage, copies_of(device))
        self.reads: LossReads | None = None
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
            ModelError: the loss is no scalar, or no mean over samples, or changes
                what it is given.
            NonFiniteError: the loss is not a finite number, and is read at once.
        """
        row, check = None, self._step_check
        given = *outputs, microbatch.targets
        versions = None if self.owns_batch else versions_of(*given)
        named = self.named(outputs[0], microbatch.targets, *outputs[1:])
        if now is not None and versions is not None:
            refuse_changes(now[0], versions, *given)
        if now is not None and check is not None:
            row = check.keep(now[0], named[TOTAL], outputs, microbatch, weight)
        if not weight:
            named = zero_losses(named, outputs)
        if now is not None:
            self.values.take(*now, named, row)
        return named[TOTAL]

    def sum_on_device(self, step: int) -> Tensor | None:
        """Return the sum of a step's losses to train, which are being copied.

        It is not finite if one of them is not, or if `compare` will refuse them; the
        host does not wait for it. None if it must, for they are compared whole.
        """
        check = self._step_check
        wrong = 0.0 if check is None else check.difference_on_device(step)
        return None if wrong is None else self.values.sum_on_device(step) + wrong

    def compare(self, step: int) -> None:
        """Compare a step's losses, which were read, with their joint loss.

        Raises:
            ModelError: they are not that of the batch.
        """
        rows = self.values.rows.pop(step, [])
        if self._step_check is not None:
            self._step_check.compare(step, rows)

    def _together(self, outputs: Sequence[Any], targets: Any) -> dict[str, Tensor]:
        """Return the losses of the model's output and those of other nets."""
        return self.named(outputs[0], targets, *outputs[1:])


_NAN_HINT: Final = (
    ". If all targets of it are ignored, their mean is nan: hocket.TokenMean(loss) "
    "leaves such microbatches out"
)


class _Taken(NamedTuple):
    """What was taken of one microbatch, on the device.

    Args:
        names: what its losses are named.
        values: the losses, and the numbers that come with them.
    """

    names: tuple[str, ...]
    values: Tensor


@dataclass(frozen=True, slots=True)
class _Copied:
    """Losses on their way to the host.

    Args:
        losses: on the device, by step and microbatch.
        host: their values, one after the other, once they have arrived.
        event: the event behind the copy.
    """

    losses: dict[tuple[int, int], _Taken]
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
        rows: the numbers that came with losses, by step, once they are read.
    """

    stage: int
    copies: Copies | None

    def __post_init__(self) -> None:
        """Begin without losses."""
        self.outcome = "no weights were updated from it"
        self.rows: dict[int, list[Tensor]] = {}
        self._unread: dict[tuple[int, int], _Taken] = {}
        self._copied: list[_Copied] = []
        self._values: dict[int, dict[int, dict[str, float]]] = {}  # by step

    def take(
        self,
        step: int,
        index: int,
        named: Mapping[str, Tensor],
        row: Tensor | None = None,
    ) -> None:
        """Keep the losses of one microbatch.

        Args:
            step: the step.
            index: the microbatch.
            named: its losses.
            row: numbers that come to the host with them, of float64.

        Raises:
            NonFiniteError: the loss to train is not finite, and is read at once.
        """
        if self.copies is None:
            self._keep(step, index, {name: x.item() for name, x in named.items()}, row)
            return
        # Copies: some losses share memory with what they are the mean of.
        values = torch.stack([x.detach().to(torch.float64) for x in named.values()])
        both = values if row is None else torch.cat([values, row])
        self._unread[step, index] = _Taken(tuple(named), both)

    def begin_read(self) -> None:
        """Begin to copy all losses to the host, behind the work queued so far."""
        copies, unread = self.copies, self._unread
        if copies is None or not unread:
            return
        self._unread = {}
        scalars = torch.cat([taken.values for taken in unread.values()])
        host = torch.empty(len(scalars), dtype=scalars.dtype, pin_memory=copies.pins)
        event = copies.to_host((host,), (scalars,))
        self._copied.append(_Copied(unread, host, event))

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
            parts = copy.host.split([len(x.values) for x in copy.losses.values()])
            for (now, taken), part in zip(copy.losses.items(), parts, strict=True):
                num = len(taken.names)
                named = dict(zip(taken.names, part[:num].tolist(), strict=True))
                self._keep(*now, named, part[num:])
        if step is not None:
            return self._values.pop(step, {})
        values, self._values = self._values, {}
        return {i: named for of_step in values.values() for i, named in of_step.items()}

    def sum_on_device(self, step: int) -> Tensor:
        """Return the sum of a step's losses to train, which are being copied.

        It is not finite if one of them is not; the host does not wait for it.
        """
        totals = [
            taken.values[taken.names.index(TOTAL)]
            for copy in self._copied
            for (of_step, _), taken in copy.losses.items()
            if of_step == step
        ]
        return torch.stack(totals).sum()

    def clear(self) -> None:
        """Drop the losses that were kept."""
        self._unread.clear()
        self._copied.clear()
        self.rows.clear()
        self._values.clear()

    def _keep(
        self, step: int, index: int, values: dict[str, float], row: Tensor | None
    ) -> None:
        total = values[TOTAL]
        if not math.isfinite(total):
            raise NonFiniteError(
                f"the loss is {total} at step {step}, stage {self.stage}, "
                f"microbatch {index}; {self.outcome}"
                f"{_NAN_HINT if math.isnan(total) else ''}"
            )
        self._values.setdefault(step, {})[index] = values
        if row is not None and len(row):
            self.rows.setdefault(step, []).append(row)
