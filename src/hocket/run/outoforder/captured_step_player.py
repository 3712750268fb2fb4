"""Plays captured steps for a pipeline on one device: `schedule="ooo-single"`.

    Driver ──▶ Executor ──▶ CapturedStepPlayer ──▶ CompiledStep
                   │        in the place of the player of lanes
                   └ one stage: the whole model, for evaluation and checkpoints

A step seeds the generator once, and equals the eager step under that seed.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from torch import nn

from hocket.errors import ConfigError
from hocket.run.data.batch import Microbatch
from hocket.run.data.step_batch import Batches, NetBatches
from hocket.run.device.open import open_device
from hocket.run.device.stopwatch import make_stopwatch
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.engine.executor import Executor
from hocket.run.engine.lanes.op_times import OpTimes
from hocket.run.engine.lanes.play_plan import Portion
from hocket.run.outoforder.compile_step import CompiledStep, status_of_captured_step
from hocket.run.stage.runner import StageRunner
from hocket.run.stage.seed import seed_generators, step_seed

_NUM_LANES: Final = 2
_TIMEOUT_S: Final = 600.0


class CapturedStepPlayer:
    """Plays a pipeline's steps as captured ones, on the weights of its only stage.

    Args:
        executor: has one stage, the whole model.
        example: the batch on which orders are measured; nothing is trained.
        recorder: notes each step.
        memory_bytes: the most that the step's tensors may take; None for no limit.

    Raises:
        ConfigError: no weight is trained.
        FitError: the memory is less than the serial order needs.
        CaptureError: the model changes its weights in forward.

    Warns:
        EagerStepWarning: the step cannot be captured; it runs as it is.
    """

    def __init__(
        self,
        executor: Executor,
        example: Microbatch,
        recorder: FlightRecorder,
        memory_bytes: int | None,
    ) -> None:
        (self._runner,) = executor.runners.values()
        (self._updater,) = executor.updaters.values()
        if self._updater.optimizer is None:
            raise ConfigError(
                "no parameter of the model wants a gradient (requires_grad): there is "
                "nothing to train"
            )
        self._sync, self._recorder = executor.sync, recorder
        self._device = executor.device
        self._runner.loss.values.outcome = "the weights were updated from it"
        self._runner.train(mode=True)
        self._watch = make_stopwatch(1, executor.device)
        self.step = CompiledStep(
            _WholeModel(self._runner),
            self._runner.loss.named,
            self._updater.optimizer,
            open_device(executor.device, _NUM_LANES, timeout_s=_TIMEOUT_S),
            memory_bytes,
        )
        self.step.prepare((example.leaves, example.targets))

    def begin(self, batches: NetBatches) -> None:
        """Do nothing: there are no messages."""

    def play(self, portion: Portion, first: int, batches: Batches) -> OpTimes:
        """Play one step.

        Args:
            portion: the whole step.
            first: the step's number among all that were begun.
            batches: the batch, as one microbatch.

        Returns:
            The times of F, B and U; the whole step counts as B.

        Raises:
            NonFiniteError: the loss is not finite.
            RunError: a lane failed.
        """
        (work,) = batches[first].values()
        number, (batch,) = work.step.number, work.microbatches
        self._recorder.begin("captured step", number)
        self._watch.start(0)
        seed_generators(self._device, step_seed(self._runner.seed, number))
        losses = self.step.submit((batch.leaves, batch.targets))
        self._watch.end(0)
        self._updater.advance()
        self._sync.take_status(status_of_captured_step(number))
        self._runner.loss.values.take(number, 0, losses)
        self._sync.after_losses(self._runner.number, work)
        (start_s,), (end_s,) = self._watch.read()
        self._recorder.end()
        return OpTimes(
            (np.array((start_s, start_s, end_s)),), (np.array((start_s, end_s, end_s)),)
        )

    def busy_s(self, portion: Portion, record: OpTimes) -> float:
        """Return the seconds of a step."""
        return float((record.end_s[0] - record.start_s[0]).sum())


class _WholeModel(nn.Module):
    """Calls a stage that is a whole model, in its precision.

    Args:
        runner: the stage's.
    """

    def __init__(self, runner: StageRunner) -> None:
        super().__init__()
        self.stage = runner.module
        self._runner = runner

    def forward(self, *leaves: Any) -> Any:
        """Return the model's output for the leaves of its arguments."""
        return self._runner.evaluate(Microbatch(leaves, None, 0), ())
