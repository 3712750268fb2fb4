"""Chooses the student's schedule by the steps that it takes with all nets.

    rank 0   for each schedule: cut all nets, fill the order, simulate ─▶ the fastest

Layers' costs are measured once, costs of stages are their sums, and links are the usual
ones, as for a student alone. What an optimizer's step takes is the same whatever the
order, and left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hocket.core.costs import Costs, Link
from hocket.core.op import Kind
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.draw.quantity import byte_size
from hocket.errors import FitError, ModelError, PlanError
from hocket.model.profile.costs import UpdateCost, stage_costs
from hocket.model.stages.cut import cut
from hocket.passes.fill_with import long_step_s
from hocket.planner.recompute import recomputing
from hocket.run.cluster.broadcast import decide_on_rank_0
from hocket.run.cluster.layout import Layout
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.tune.choose import search_of
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.cut.cut_model import CutModel
from hocket.run.tune.cut.profiled_model import ProfiledModel
from hocket.run.tune.link_costs import usual_cluster
from hocket.run.tune.order import make_order
from hocket.run.tune.teachers.cuts import cut_teachers, student_boundaries
from hocket.run.tune.teachers.filled import JointNets, filled_order, joined
from hocket.run.tune.teachers.stages import KnownTeacher


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One schedule of the student, with all nets cut for it.

    Args:
        config: the configuration, with the schedule's name and its stages per device.
        order: the student's order, for any costs.
        nets: all nets.
        work_s: the work of the busiest device in a step, which no order beats.
    """

    config: PipelineConfig
    order: Schedule
    nets: JointNets
    work_s: float


def choose_schedule(
    config: PipelineConfig,
    context: WorkerContext,
    student: ProfiledModel,
    teachers: Sequence[KnownTeacher],
) -> PipelineConfig:
    """Choose the schedule, the same on every worker. Every worker must call this.

    Args:
        config: asks for "auto", or for a schedule with any number of stages per device.
        context: this worker's context.
        student: the profiled student.
        teachers: the profiled teachers.

    Returns:
        The configuration with the schedule's name and its stages per device.

    Raises:
        FitError: no order fits the memory.
        PlanError: no order takes the numbers.
    """
    most = config.memory_of(context.world)

    def decide() -> tuple[str, int]:
        found = _candidates(config, context, student, teachers)
        chosen = _best(sorted(found, key=lambda x: x.work_s), context.layout, most)
        assert chosen.stages_per_device is not None
        return str(chosen.schedule), chosen.stages_per_device

    name, num = decide_on_rank_0(context.world, decide, "choice of the schedule")
    return replace(config, schedule=name, stages_per_device=num, max_delay=0)


def _candidates(
    config: PipelineConfig,
    context: WorkerContext,
    student: ProfiledModel,
    teachers: Sequence[KnownTeacher],
) -> Iterator[_Candidate]:
    """Yield the schedules that can be filled with these teachers."""
    layout = context.layout
    search = search_of(replace(config, max_delay=0), layout)
    names = search.schedules if config.schedule == "auto" else (str(config.schedule),)
    most = len(student.captured.layers) // layout.num_devices
    for name in names or ():
        for num in search.stages_per_device:
            own = replace(config, schedule=name, stages_per_device=num)
            try:
                if num <= max(most, 1):
                    yield _candidate(own, context, student, teachers)
            except (PlanError, ModelError):
                continue


def _candidate(
    config: PipelineConfig,
    context: WorkerContext,
    student: ProfiledModel,
    teachers: Sequence[KnownTeacher],
) -> _Candidate:
    """Cut all nets for one schedule.

    Raises:
        PlanError: the schedule refuses the numbers.
        ModelError: the nets cannot be cut so.
    """
    order = make_order(
        str(config.schedule),
        context.layout,
        config.num_microbatches,
        config.stages_per_device,
        whole_batch=config.whole_batch,
    )
    if order.body:
        raise PlanError(f"the steps of {config.schedule} overlap: it is not filled")
    program = order.program
    at = student_boundaries(config, program, context, student, teachers)
    modules = cut(student.captured, at, program.flows)
    states = config.state_bytes(student.captured.state.trained)
    costs = stage_costs(
        student.profile,
        at,
        modules,
        link=usual_cluster(context.world).inside,
        handling=Link(),
        updates=[
            UpdateCost(0.0, sum(states.get(n, 0) for n, _ in x.named_parameters()))
            for x in modules
        ],
    )
    found = CutModel(student, at, modules, costs)
    cuts = cut_teachers(teachers, found, program)
    nets = joined(config, order, found, cuts)
    return _Candidate(config, order, nets, _work_s(nets.program.stages_on, nets))


def _work_s(stages_on: Sequence[Sequence[int]], nets: JointNets) -> float:
    """Return the seconds that the busiest device computes in a step."""
    stages = nets.program.stages
    each_s = [
        nets.program.num_microbatches_of(n)
        * (x.forward_s + stages[n].trainable * x.seconds(Kind.BACKWARD))
        for n, x in enumerate(nets.model.costs.stages)
    ]
    return max(sum(each_s[stage] for stage in own) for own in stages_on)


def _best(found: Sequence[_Candidate], layout: Layout, most: int) -> PipelineConfig:
    """Return the configuration with the shortest step that fits the memory.

    Raises:
        FitError: none fits; names the smallest memory that works.
        PlanError: there are none.
    """
    best: tuple[float, PipelineConfig] | None = None
    least: FitError | None = None
    for candidate in found:
        if best is not None and candidate.work_s >= best[0]:
            break
        try:
            step_s = _step_s(candidate, layout, most)
        except FitError as error:
            if least is None or error.needed_bytes < least.needed_bytes:
                least = error
            continue
        if best is None or step_s < best[0]:
            best = step_s, candidate.config
    if best is not None:
        return best[1]
    if least is not None:
        raise least
    raise PlanError(
        'schedule="auto": no order of the student can be filled with its teachers for '
        "these numbers of devices and microbatches: name a schedule to see why"
    )


def _step_s(candidate: _Candidate, layout: Layout, most: int) -> float:
    """Fill the order, and return how long its step takes.

    Raises:
        FitError: it needs more memory.
    """
    config, nets = candidate.config, candidate.nets
    filled = filled_order(config, layout, candidate.order, nets, most)
    costs = recomputing(config.recompute, filled, nets.model.costs, most)
    _refuse_large(config, filled, costs, most)
    return long_step_s(filled, costs)


def _refuse_large(
    config: PipelineConfig, filled: Schedule, costs: Costs, most: int
) -> None:
    timeline = simulate(filled, costs)
    peaks = [timeline.peak_bytes(d) for d in range(filled.program.num_devices)]
    device = peaks.index(max(peaks))
    needed = round(peaks[device])
    if needed > most:
        raise FitError(
            f"no order of the student with its teachers fits {byte_size(most)} per "
            f"device; {config.schedule} misses least, with {byte_size(needed)} on "
            f"device {device}. The smallest memory_bytes that works is {needed}; more "
            'devices, more microbatches, a smaller batch, or recompute="auto" need '
            "less",
            device=device,
            needed_bytes=needed,
            memory_bytes=most,
        )
