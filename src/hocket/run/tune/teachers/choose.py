"""Chooses the student's schedule by the steps that it takes with all nets.

    all workers   for each schedule: cut all nets, measure messages and updates
    rank 0        for each schedule: fill the order, simulate ─▶ the fastest

The order that is chosen is played with the costs that it was chosen by, but for what a
dry run of it finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hocket.core.costs import Costs
from hocket.core.op import Kind
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.draw.quantity import byte_size
from hocket.errors import FitError, ModelError, PlanError
from hocket.passes.fill_with import long_step_s
from hocket.planner.recompute import recomputing
from hocket.run.cluster.broadcast import decide_on_rank_0
from hocket.run.cluster.layout import Layout
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.tune.choose import search_of
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.cut.cut_model import CutModel
from hocket.run.tune.cut.profiled_model import ProfiledModel
from hocket.run.tune.order import configured_order
from hocket.run.tune.teachers.filled import JointNets, NetCutter, filled_order


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One schedule of the student, with all nets cut for it.

    Args:
        config: the configuration, with the schedule's name and its stages per device.
        order: the student's order, for any costs.
        nets: all nets.
    """

    config: PipelineConfig
    order: Schedule
    nets: JointNets

    @property
    def work_s(self) -> float:
        """The work of the busiest device in a step, which no order beats."""
        program = self.nets.program
        each_s = [
            program.num_microbatches_of(n)
            * (x.forward_s + program.stages[n].trainable * x.seconds(Kind.BACKWARD))
            + x.update_s
            for n, x in enumerate(self.nets.model.costs.stages)
        ]
        return max(sum(each_s[stage] for stage in own) for own in program.stages_on)


def choose_order(
    config: PipelineConfig,
    context: WorkerContext,
    student: ProfiledModel,
    cutter: NetCutter,
) -> tuple[PipelineConfig, Schedule, CutModel]:
    """Choose the schedule, the same on every worker. Every worker must call this.

    Args:
        config: asks for "auto", or for a schedule with any number of stages per device.
        context: this worker's context.
        student: the profiled student.
        cutter: cuts all nets.

    Returns:
        The configuration with the schedule's name and its stages per device; the filled
        order; and the stages of all nets with their costs.

    Raises:
        FitError: no order fits the memory.
        PlanError: no order takes the numbers.
    """
    world, layout = context.world, context.layout
    most = config.memory_of(world)
    found = [*_candidates(config, layout, student, cutter)]

    def decide() -> tuple[int, str]:
        return _best(found, layout, most)

    number, text = decide_on_rank_0(world, decide, "choice of the schedule")
    chosen = found[number]
    return chosen.config, Schedule.parse(text), chosen.nets.model


def _candidates(
    config: PipelineConfig, layout: Layout, student: ProfiledModel, cutter: NetCutter
) -> Iterator[_Candidate]:
    """Yield the schedules that can be filled with these teachers."""
    config = replace(config, max_delay=0)
    search = search_of(config, layout)
    names = search.schedules if config.schedule == "auto" else (str(config.schedule),)
    most = len(student.captured.layers) // layout.num_devices
    for name in names or ():
        for num in search.stages_per_device:
            own = replace(config, schedule=name, stages_per_device=num)
            try:
                if num <= max(most, 1):
                    order = configured_order(own, layout)
                    if not order.body:  # steps that overlap are not filled
                        yield _Candidate(own, order, cutter.cut(own, order))
            except (PlanError, ModelError):
                continue


def _best(found: Sequence[_Candidate], layout: Layout, most: int) -> tuple[int, str]:
    """Return the number and the filled order of the shortest step that fits the memory.

    Raises:
        FitError: none fits; names the smallest memory that works.
        PlanError: there are none.
    """
    best: tuple[float, int, Schedule] | None = None
    least: FitError | None = None
    for number in sorted(range(len(found)), key=lambda x: found[x].work_s):
        if best is not None and found[number].work_s >= best[0]:
            break
        try:
            step_s, order = _filled(found[number], layout, most)
        except FitError as error:
            if least is None or error.needed_bytes < least.needed_bytes:
                least = error
            continue
        if best is None or step_s < best[0]:
            best = step_s, number, order
    if best is not None:
        return best[1], str(best[2])
    if least is not None:
        raise least
    raise PlanError(
        'schedule="auto": no order of the student can be filled with its teachers for '
        "these numbers of devices and microbatches: name a schedule to see why"
    )


def _filled(candidate: _Candidate, layout: Layout, most: int) -> tuple[float, Schedule]:
    """Fill the order; return how long its step takes, and the order.

    Raises:
        FitError: it needs more memory.
    """
    config, nets = candidate.config, candidate.nets
    filled = filled_order(config, layout, candidate.order, nets, most)
    costs = recomputing(config.recompute, filled, nets.model.costs, most)
    _refuse_large(config, filled, costs, most)
    return long_step_s(filled, costs), filled


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
