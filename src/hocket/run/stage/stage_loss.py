"""Computes the losses of a net's last stage, and checks some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.run.data.batch import Microbatch
from hocket.run.data.loss import TOTAL, LossFunction, losses_of
from hocket.run.data.token_mean import zero_losses
from hocket.run.device.copies import copies_of
from hocket.run.stage.loss_checks.batch_loss_check import check_mean
from hocket.run.stage.loss_checks.step_loss_check import StepLossCheck
from hocket.run.stage.loss_values import LossValues
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
        values: the losses of the forwards since they were last read.
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
        self.values = LossValues(stage, copies_of(device))
        self._device = device
        self._losses_of = precision.computing(device, losses_of)
        self._checks = checks  # until one was checked
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
        return self._losses_of(function, output, targets, *others)

    def total(
        self,
        outputs: tuple[Any, ...],
        microbatch: Microbatch,
        now: tuple[int, int] | None,
        *,
        counts: bool,
    ) -> Tensor:
        """Return the loss to train of one microbatch.

        Args:
            outputs: the model's, and those of other nets.
            microbatch: has the targets.
            now: the step and microbatch for which values are kept; None when the
                forward runs once more.
            counts: whether any of the targets counts; else all losses are 0.

        Raises:
            ModelError: the loss is no scalar, or no mean over samples.
            NonFiniteError: the loss is not a finite number, and is read at once.
        """
        targets, num_samples = microbatch.targets, microbatch.num_samples
        named = self.named(outputs[0], targets, *outputs[1:])
        if self._checks:
            self._check(outputs, targets, num_samples)
        if not counts:
            named = zero_losses(named, outputs)
        if now is not None:
            self.values.take(*now, named)
            if self._step_check is not None:
                self._step_check.keep(now[0], outputs, targets, num_samples)
        return named[TOTAL]

    def compare(self, step: int) -> None:
        """Compare a step's losses with their joint loss (`StepLossCheck`)."""
        if self._step_check is not None:
            self._step_check.compare(step)

    def _together(self, outputs: Sequence[Any], targets: Any) -> dict[str, Tensor]:
        """Return the losses of the model's output and those of other nets."""
        return self.named(outputs[0], targets, *outputs[1:])

    def _check(self, outputs: Sequence[Any], targets: Any, num_samples: int) -> None:
        """Check, once, that microbatches' losses add up to the batch's."""
        assert self.function is not None
        check_mean(
            self.function,
            self._together,
            outputs,
            targets,
            num_samples,
            device=self._device,
        )
        self._checks = False
