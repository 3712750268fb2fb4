"""The nets of a student and its teachers as one program, and its filled order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hocket.core.check import check
from hocket.core.costs import Costs
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.model.stages.cut import num_frozen_stages
from hocket.passes.fill_with import fill_with
from hocket.passes.freeze_stages import freeze_stages
from hocket.run.cluster.layout import Layout
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.cut.cut_model import CutModel, cut_and_measure
from hocket.run.tune.cut.profiled_model import ProfiledModel
from hocket.run.tune.teachers.cuts import cut_teachers, student_boundaries
from hocket.run.tune.teachers.program import (
    joint_costs,
    joint_program,
    measure_teacher_updates,
)
from hocket.run.tune.teachers.stages import CutTeacher, KnownTeacher
from hocket.run.tune.timed_order import order_for_costs, takes_costs


@dataclass(frozen=True, slots=True)
class JointNets:
    """A student and its teachers, cut.

    Args:
        program: the program of all nets.
        model: the stages of all nets with their costs; the teachers' come first.
        student: the student's stages alone.
    """

    program: Program
    model: CutModel
    student: CutModel


class NetCutter:
    """Cuts all nets for orders of the student, and measures every cut once.

    Orders with equal stages thus have equal costs, so that these compare orders alone.

    Args:
        context: this worker's context.
        student: the profiled student.
        teachers: the profiled teachers.
    """

    def __init__(
        self,
        context: WorkerContext,
        student: ProfiledModel,
        teachers: Sequence[KnownTeacher],
    ) -> None:
        """Begin without any cut."""
        self._context = context
        self._student = student
        self._teachers = teachers
        self._found: dict[tuple[Program, tuple[int, ...]], _Measured] = {}

    def cut(self, config: PipelineConfig, order: Schedule) -> JointNets:
        """Cut all nets for an order of the student. Every worker must call this.

        Args:
            config: the pipeline's.
            order: the student's, for any costs.

        Raises:
            ModelError: the nets cannot be cut so.
            ConfigError: a teacher's cut makes more stages than there are devices.
        """
        program, context = order.program, self._context
        at = student_boundaries(config, program, context, self._student, self._teachers)
        key = program, at
        if key not in self._found:
            student = cut_and_measure(config, program, context, self._student, at)
            cuts = tuple(cut_teachers(self._teachers, student, program))
            update_s = measure_teacher_updates(cuts, context)
            costs = joint_costs(cuts, student.costs, update_s)
            self._found[key] = _Measured(student, cuts, costs)
        found = self._found[key]
        student, cuts = found.student, found.teachers
        own = _frozen(config, order, student).program
        return JointNets(
            joint_program(own, cuts, whole_batch=config.whole_batch),
            replace(
                student,
                modules=(*(m for x in cuts for m in x.modules), *student.modules),
                costs=found.costs,
                teachers=cuts,
            ),
            student,
        )


@dataclass(frozen=True, slots=True)
class _Measured:
    """One cut of all nets, and the costs of all stages."""

    student: CutModel
    teachers: tuple[CutTeacher, ...]
    costs: Costs


def filled_order(
    config: PipelineConfig,
    layout: Layout,
    order: Schedule,
    nets: JointNets,
    most: int,
) -> Schedule:
    """Fill the student's order with the teachers' forwards.

    Args:
        config: the pipeline's.
        layout: the ranks by device and replica.
        order: the student's, for any costs; where its schedule takes costs, it is made
            for those of its stages first.
        nets: all nets.
        most: the bytes that all nets may take on each device.

    Raises:
        FitError: no order of the student's schedule fits the memory.
    """
    if takes_costs(config.schedule):
        left = most - _most_of_teachers(nets)
        order = order_for_costs(config, layout, order, nets.student, left)
    own = _frozen(config, order, nets.student)
    ahead = {x.name: x.known.teacher.num_ahead for x in nets.model.teachers}
    filled = fill_with(
        own,
        nets.program,
        [*ahead],
        costs=nets.model.costs,
        look_ahead=ahead,
        own_lane=config.teacher_lane,
    )
    check(filled)
    return filled


def _frozen(config: PipelineConfig, order: Schedule, student: CutModel) -> Schedule:
    """Leave out the backwards of frozen stages."""
    if any(teacher.moves for teacher in config.teachers.values()):
        return order  # a stage that a teacher follows keeps its op U
    return freeze_stages(order, num_frozen_stages(student.modules))


def _most_of_teachers(nets: JointNets) -> int:
    """Return the most bytes of teachers' weights on one device."""
    stages, costs = nets.program.stages, nets.model.costs.stages
    return max(
        sum(costs[n].weight_bytes for n in own if not stages[n].trainable)
        for own in nets.program.stages_on
    )
