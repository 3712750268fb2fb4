"""Plays captured steps for a pipeline on one device: `schedule="ooo-single"`.

    Driver ──▶ Executor ──▶ CapturedStepPlayer ──▶ CompiledStep
                   │        in the place of the player of lanes: the user's own model
                   └ one stage: the whole model, for evaluation and checkpoints

Both have the same weights and buffers. A step seeds the generator once, and equals the
eager step under that seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import ConfigError
from hocket.model.capture.captured import Captured
from hocket.run.data.batch import Microbatch
from hocket.run.data.loss import LossFunction
from hocket.run.data.step_batch import Batches, NetBatches
from hocket.run.device.late import Late
from hocket.run.device.open import open_device
from hocket.run.device.stopwatch import Times, make_stopwatch
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.engine.executor import Executor
from hocket.run.engine.lanes.op_times import OpTimes
from hocket.run.engine.lanes.play_plan import Portion
from hocket.run.outoforder.compile_step import (
    CompiledStep,
    ModelAndLoss,
    status_of_captured_step,
)
from hocket.run.stage.precision import Precision
from hocket.run.stage.seed import seed_generators, step_seed

_NUM_LANES: Final = 2
_NUM_OPS: Final = 3  # F, B and U
_TIMEOUT_S: Final = 600.0


class CapturedStepPlayer:
    """Plays a pipeline's steps as captured ones, on the weights of its only stage.

    Args:
        executor: has one stage, the whole model.
        captured: the model.
        example: the batch on which orders are measured; nothing is trained.
        recorder: notes each step.
        memory_bytes: the most that the step's tensors may take; None for no limit.
        precision: the type that forwards compute in.

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
        captured: Captured,
        example: Microbatch,
        recorder: FlightRecorder,
        memory_bytes: int | None,
        precision: Precision,
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
        loss, device = self._runner.loss.function, executor.device
        assert loss is not None
        whole = _WholeModel(captured, loss, device, precision)
        self._model = whole.model
        self._buffers = [*_shared_buffers(self._model, self._runner.module)]
        self._train()
        self._watch = make_stopwatch(1, executor.device)
        self.step = CompiledStep(
            whole,
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
        self._train()
        losses = self.step.submit((batch.leaves, batch.targets))
        for home, name, buffer in self._buffers:
            if home[name] is not buffer:  # a forward has replaced it
                buffer.copy_(home[name].detach())
                home[name] = buffer
        self._watch.end(0)
        self._updater.advance()
        self._sync.take_status(status_of_captured_step(number))
        self._runner.loss.values.take(number, 0, losses)
        self._sync.after_losses(self._runner.number, work)
        whole = self._watch.read()
        self._recorder.end()
        return OpTimes(Late(partial(_as_three_ops, whole)), _NUM_OPS)

    def _train(self) -> None:
        """Set training mode, unless the model is in it: its parts may not be."""
        if not self._model.training:
            self._model.train()

    def worked_s(self, portion: Portion, record: OpTimes) -> tuple[float, float]:
        """See `PortionPlayer.worked_s`: B is the whole step."""
        ((start_s, end_s),) = record.times.value
        return float((end_s - start_s).sum()), float(end_s.max())


def _as_three_ops(whole: Late[Times]) -> list[Times]:
    """Return the times of F, B and U in one lane; the whole step counts as B."""
    (start_s,), (end_s,) = whole.value
    return [(np.array((start_s, start_s, end_s)), np.array((start_s, end_s, end_s)))]


class _WholeModel(ModelAndLoss):
    """Calls the user's own model.

    Args:
        captured: the model.
        loss: the user's own loss.
        device: what it computes on.
        precision: the type that it computes in.
    """

    def __init__(
        self,
        captured: Captured,
        loss: LossFunction,
        device: torch.device,
        precision: Precision,
    ) -> None:
        super().__init__(captured.model.to(device), loss)
        self._spec = captured.example.spec
        self._device, self._precision = device, precision

    def forward(self, *leaves: Any) -> Any:
        """Return the model's output for the leaves of its arguments."""
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return self._precision.computing(self._device, self.model)(*args, **kwargs)


def _shared_buffers(
    model: nn.Module, stage: nn.Module
) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Give a model the buffers of its stage; yield where each one lies."""
    for path, buffer in stage.named_buffers():
        place, _, name = path.rpartition(".")
        home = model.get_submodule(place)._buffers
        home[name] = buffer
        yield home, name, buffer
