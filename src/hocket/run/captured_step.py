"""`schedule="ooo-single"`: a pipeline of one stage, whose steps are captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

from hocket.errors import ConfigError
from hocket.model.capture.captured import Captured
from hocket.options import CAPTURED_STEP, captured_step_faults
from hocket.run.data.loss import WholeBatch
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.engine.executor import Executor
from hocket.run.engine.plan import Plan
from hocket.run.outoforder.captured_step_player import CapturedStepPlayer
from hocket.run.tune.config import PipelineConfig


def of_one_stage(config: PipelineConfig, num_workers: int) -> PipelineConfig:
    """Return the configuration of the same training, with one stage.

    Args:
        config: asks for captured steps.
        num_workers: the number of workers.

    Raises:
        ConfigError: options that a captured step does not go with; names all.
    """
    faults = [*_faults(config, num_workers), *captured_step_faults(config, config)]
    if faults:
        raise ConfigError(f"schedule={CAPTURED_STEP!r}: {'; '.join(faults)}")
    return replace(config, schedule="gpipe")


def _faults(config: PipelineConfig, num_workers: int) -> Iterator[str]:
    if num_workers > 1:
        yield f"there are {num_workers} workers: it is for one device; start one"
    if config.teachers:
        yield "teachers run in the gaps of a pipeline: take another schedule"
    if config.freeze is not None:
        yield "freeze changes the model while training runs: take another schedule"
    if isinstance(config.loss, WholeBatch):
        yield "the batch is not cut: give the loss without WholeBatch"


def play_captured_steps(
    executor: Executor,
    plan: Plan,
    config: PipelineConfig,
    captured: Captured,
    recorder: FlightRecorder,
    stack: ExitStack,
) -> Plan:
    """Let an executor of one stage play captured steps.

    Args:
        executor: the executor.
        plan: its plan.
        config: has the example, and the limit of memory.
        captured: the model.
        recorder: notes each step.
        stack: closes the step's lanes.

    Returns:
        The plan, with the step's own prediction.

    Raises:
        HocketError: see `CapturedStepPlayer`.
    """
    (example,) = config.microbatches()
    player = CapturedStepPlayer(
        executor,
        captured,
        example,
        recorder,
        config.memory_bytes,
        config.training.compute_precision,
    )
    stack.callback(player.step.close)
    executor.player = player
    predicted = player.step.predicted if player.step.is_captured else plan.predicted
    return replace(plan, schedule_name=CAPTURED_STEP, predicted=predicted)
