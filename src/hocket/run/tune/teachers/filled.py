"""The nets of a student and its teachers as one program, and its filled order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hocket.core.check import check
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.model.stages.cut import num_frozen_stages
from hocket.passes.fill_with import fill_with
from hocket.passes.freeze_stages import freeze_stages
from hocket.run.cluster.layout import Layout
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.cut.cut_model import CutModel
from hocket.run.tune.teachers.program import joint_costs, joint_program
from hocket.run.tune.teachers.stages import CutTeacher
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


def joined(
    config: PipelineConfig,
    order: Schedule,
    student: CutModel,
    cuts: Sequence[CutTeacher],
    update_s: Sequence[float] = (),
) -> JointNets:
    """Put a student and its teachers together.

    Args:
        config: the pipeline's.
        order: an order of the student.
        student: the student's stages.
        cuts: the teachers' stages.
        update_s: the seconds of each teacher stage's update; 0 when not given.
    """
    own = _frozen(config, order, student).program
    seconds = update_s or [0.0] * sum(len(x.modules) for x in cuts)
    model = replace(
        student,
        modules=(*(m for x in cuts for m in x.modules), *student.modules),
        costs=joint_costs(cuts, student.costs, seconds),
        teachers=tuple(cuts),
    )
    program = joint_program(own, cuts, whole_batch=config.whole_batch)
    return JointNets(program, model, student)


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
