"""Decides and makes what a pipeline runs on one worker, before the first step.

    PipelineConfig ─▶ order ─▶ transport ─▶ Plan ─▶ Executor
                        │ schedule="auto": chosen here
                        │ "zb-auto": measured and made here
                        │ with teachers: chosen and filled with their forwards here
                        └ "ooo-single": one stage, whose steps are captured

Only the outline of the uncut model is kept: if the user keeps no reference to it, the
weights of other workers' stages are freed.

Which options do not go together with layers that freeze while training runs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final
from warnings import warn

import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from hocket import cuda
from hocket.core.costs import StageCost
from hocket.core.schedule import Schedule
from hocket.errors import ConfigError, NoMemoryError
from hocket.freeze.policy import Measures, Policy
from hocket.model.capture.captured import Captured
from hocket.options import CAPTURED_STEP, captured_step_faults, freezing_faults
from hocket.run.cluster.doctor.nvidia_smi import probe_gpu_states
from hocket.run.cluster.freed_memory import trim_heap
from hocket.run.cluster.layout import Layout
from hocket.run.cluster.world import World
from hocket.run.data.loss import WholeBatch
from hocket.run.device.memory import (
    MemoryWatch,
    explain_start,
    is_out_of_memory,
)
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.elastic.freezing import Freezing
from hocket.run.elastic.make import make_freezing, other_layouts
from hocket.run.engine.executor import Executor
from hocket.run.engine.lanes.player import Player
from hocket.run.engine.make_executor import make_executor
from hocket.run.engine.plan import Plan, short_hash
from hocket.run.engine.refusals import refuse_delays, refuse_settings
from hocket.run.engine.same_everywhere import refuse_differences
from hocket.run.engine.worker_context import OpenRun, open_context
from hocket.run.nets.followed import FollowedNet
from hocket.run.outoforder.captured_step_table import CapturedStepTable
from hocket.run.stage.net_output import with_teachers
from hocket.run.tune.build import build_plan, followed_nets
from hocket.run.tune.choose import choose_order
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.cut.cut_model import CutModel
from hocket.run.tune.cut.profiled_model import ProfiledModel
from hocket.run.tune.link_costs import with_measured_gathers
from hocket.run.tune.order import configured_order
from hocket.run.tune.teachers.joint import joint_order
from hocket.run.tune.timed_order import is_timed, timed_order
from hocket.schedules.v_min import (
    RepeatingBubbleWarning,
    repeating_bubble,
    repeating_bubble_of_v_half,
)

log = logging.getLogger(__name__)

_TEXTS: Final[Mapping[object, Callable[[int, StageCost], str]]] = {
    "v-min": repeating_bubble,
    "v-half": repeating_bubble_of_v_half,
}


def of_one_stage(config: PipelineConfig, num_workers: int) -> PipelineConfig:
    """Return the configuration of the same training, with one stage.

    Args:
        config: asks for captured steps.
        num_workers: the number of workers.

    Raises:
        ConfigError: options that a captured step does not go with; names all.
    """
    faults = [
        *_faults_of_one_stage(config, num_workers),
        *captured_step_faults(config, config),
    ]
    if faults:
        raise ConfigError(f"schedule={CAPTURED_STEP!r}: {'; '.join(faults)}")
    return replace(config, schedule="gpipe")


def _faults_of_one_stage(config: PipelineConfig, num_workers: int) -> Iterator[str]:
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
        HocketError: see `CapturedStepTable`.
    """
    (example,) = config.microbatches()
    table = CapturedStepTable(
        executor,
        captured,
        example,
        config.memory_bytes,
        config.training.compute_precision,
    )
    step = table.step
    stack.callback(step.close)
    executor.player = Player(executor.plan, 0, table, recorder)
    predicted = step.predicted if step.is_captured else plan.predicted
    return replace(plan, schedule_name=CAPTURED_STEP, predicted=predicted)


@contextlib.contextmanager
def memory_explained(world: World) -> Iterator[None]:
    """Say what holds a device's memory where a start fails for it; around `assemble`.

    Raises:
        NoMemoryError: a device has no memory for what the block makes.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, NoMemoryError) or not is_out_of_memory(error):
            raise
        device = world.device
        uuid = cuda.device_uuid(device) if device.type == "cuda" else ""
        gpus = [gpu for gpu in probe_gpu_states() if gpu.uuid == uuid]
        raise explain_start(error, world.rank, device, gpus) from error
    # Capturing and profiling leave reference cycles that hold the weights of all
    # stages. Python collects cycles by the number of objects, not by their bytes.
    gc.collect()
    trim_heap()


def assemble(
    config: PipelineConfig, run: OpenRun, layout: Layout
) -> tuple[Plan, Executor, Freezing | None, tuple[FollowedNet, ...]]:
    """Decide all that can be decided before the first step, and make the executor.

    Every worker must call this.

    Args:
        config: the same on every worker.
        run: the run; its stack gets what must be closed at the end.
        layout: the ranks by device and replica.

    Returns:
        The plan, what plays it, what freezes layers, if any may freeze, and what
        follows changes of each net.

    Raises:
        HocketError: see `hocket.Pipeline`.
    """
    world, stack = run.world, run.stack
    # Workers that freeze layers connect otherwise than workers that do not.
    options = config.freezing_texts.items()
    refuse_differences(world, {f"option {n}": short_hash(x) for n, x in options})
    asked = config.schedule
    precision = config.compute_precision
    precision.check_types([config.model])
    stack.enter_context(precision.wide_gradients([config.model]))
    config = _prepared(config, world)
    config, order, known = _make_order(config, run, layout)
    refuse_settings(config, order)
    if config.freeze is not None:
        refuse_order(order)
    if layout.tp_size > 1:
        refuse_delays(order)
    context = open_context(
        config.transport,
        run,
        layout,
        order,
        clips=config.clip_norm is not None,
        others=[] if config.freeze is None else other_layouts(config, world),
    )
    plan, play_plan, nets, channels, found = build_plan(config, order, context, known)
    if world.rank == 0:
        warn_of_repeating_bubble(asked, plan)
        warn_of_batch_norms(config)
    modules = (module for net in nets for module in net.modules)  # with the loss's
    stack.enter_context(precision.wide_gradients(modules))
    executor = make_executor(
        play_plan,
        nets,
        channels,
        seed=config.seed,
        recomputes=[i for i, x in enumerate(plan.costs.stages) if x.recomputes],
        on_error=MemoryWatch(plan.schedule, plan.costs, world, layout.device).on_error,
    )
    stack.callback(executor.sync.give_up)
    plan = with_measured_gathers(plan, executor, world)
    if asked == CAPTURED_STEP:
        plan = play_captured_steps(
            executor, plan, config, found.known.captured, run.recorder, stack
        )
    freezing = None
    if config.freeze is not None:
        captured = found.known.captured
        freezing = make_freezing(config, captured, plan, executor, context)
    # Captured steps follow changes by themselves.
    followed = () if asked == CAPTURED_STEP else followed_nets(found)
    return plan, executor, freezing, followed


def _prepared(config: PipelineConfig, world: World) -> PipelineConfig:
    """Refuse options that do not go together; return those that orders are made from.

    Raises:
        ConfigError: names all such options.
    """
    if config.freeze is not None:
        refuse_with_freezing(config, config.freeze)
    if config.schedule == CAPTURED_STEP:
        return of_one_stage(config, world.world_size)
    if config.teachers:
        loss = with_teachers(config.loss, tuple(config.teachers))
        return replace(config, loss=loss)
    return config


def _make_order(
    config: PipelineConfig, run: OpenRun, layout: Layout
) -> tuple[PipelineConfig, Schedule, ProfiledModel | CutModel | None]:
    """Return the order, and what is known of the model by then.

    The configuration that comes first has the name of a schedule that was chosen.
    """
    is_chosen = config.schedule == "auto"
    if not (is_chosen or is_timed(config) or config.teachers):
        return config, configured_order(config, layout), None
    store = dist.PrefixStore("before the order", run.store)
    with contextlib.ExitStack() as stack:
        before = replace(run, store=store, stack=stack)
        context = open_context(config.transport, before, layout, None)
        if config.teachers:
            return joint_order(config, context)
        profiled = None
        if is_chosen:
            config, profiled = choose_order(config, context)
        if is_timed(config):
            return config, *timed_order(config, context, profiled)
        return config, configured_order(config, layout), profiled


def warn_of_repeating_bubble(schedule: object, plan: Plan) -> None:
    """Warn if a schedule waits in every microbatch, with the numbers.

    Args:
        schedule: the user's choice of schedule.
        plan: what will run, with its costs.

    Warns:
        RepeatingBubbleWarning: the bubble repeats.
    """
    if schedule not in _TEXTS:
        return
    program = plan.schedule.program
    text = _TEXTS[schedule](program.num_devices, plan.costs.mean_share(program))
    if text:
        warn(text, RepeatingBubbleWarning, stacklevel=2)


def warn_of_batch_norms(config: PipelineConfig) -> None:
    """Log that BatchNorms in training mode see microbatches, where a batch has several.

    Args:
        config: the user's options.
    """
    modules = config.model.named_modules()
    names = [name for name, x in modules if isinstance(x, _BatchNorm) and x.training]
    if names and config.num_parts > 1:
        log.warning(
            "%s (BatchNorms in training mode: %d) normalises each of %d microbatches "
            "by its own mean and variance; a loop over whole batches takes theirs, and "
            "trains to other weights. If these are wanted, take num_microbatches=1 and "
            "no replicas, GroupNorm in its place, or .eval() of it",
            names[0] or "the model",
            len(names),
            config.num_parts,
        )


def refuse_with_freezing(config: PipelineConfig, policy: Policy[Any]) -> None:
    """Refuse options that a pipeline with a freezing policy has no use for.

    Raises:
        ConfigError: names all such options.
    """
    faults = "; ".join(_faults(config, policy))
    if faults:
        raise ConfigError(f"freeze={type(policy).__name__}(...): {faults}")


def _faults(config: PipelineConfig, policy: Policy[Any]) -> Iterator[str]:
    if policy.measures is Measures.ACTIVATIONS:
        num_samples = config.microbatches()[0].num_samples
        if num_samples < 2:
            yield (
                "it compares the activations of samples with each other, and a "
                f"microbatch has {num_samples}: take fewer microbatches, or a larger "
                "batch"
            )
    yield from freezing_faults(config, recut=config.recut)
    if config.teachers:
        yield "teachers does not go together with it: leave it out"
    if config.whole_batch:
        yield "a loss over the whole batch does not go together with it"


def refuse_order(order: Schedule) -> None:
    """Refuse orders that cannot be made again for another shape.

    Raises:
        ConfigError: its steps overlap, or a device has several stages.
    """
    program = order.program
    if order.body:
        raise ConfigError(
            "layers can freeze where each step ends before the next begins, and steps "
            "of this order overlap: take '1f1b' or 'gpipe'"
        )
    if program.num_stages != program.num_devices or program.copies:
        raise ConfigError(
            f"this order has {program.num_stages} stages on {program.num_devices} "
            "devices: to freeze layers, take one with one stage on each, such as "
            "'1f1b' or 'gpipe'"
        )
