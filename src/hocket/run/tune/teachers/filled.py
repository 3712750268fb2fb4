"""The nets of a student and its teachers as one program, and its filled order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.core.check import check
from hocket.core.costs import StageCost
from hocket.core.program import Net, Program
from hocket.core.schedule import Schedule
from hocket.errors import ConfigError
from hocket.model.profile.precision import timed_rounds
from hocket.model.stages.cut import boundaries_from_names, num_frozen_stages
from hocket.model.stages.stage import StageModule
from hocket.passes.fill_with import fill_with
from hocket.passes.freeze_stages import freeze_stages
from hocket.planner.balance import cut_teacher, joint_balance
from hocket.planner.stages import added_up
from hocket.run.cluster.layout import Layout
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.cut.cut_model import CutModel, balanced_boundaries, cut_and_measure
from hocket.run.tune.cut.profiled_model import ProfiledModel
from hocket.run.tune.teachers.stages import (
    CutTeacher,
    KnownTeacher,
    TeacherPlaces,
    beside_student,
    on_devices,
)
from hocket.run.tune.timed_order import order_for_costs, takes_costs
from hocket.run.weights.follower import Follower, Pairs
from hocket.run.weights.momentum import FollowerUpdate


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


_Cuts: TypeAlias = tuple[CutModel, CutModel]  # of all nets, and of the student


@dataclass(eq=False)
class NetCutter:
    """Cuts all nets for orders of the student, and measures every cut once.

    Orders with equal stages thus have equal costs, so that these compare orders alone.

    Args:
        context: this worker's context.
        student: the profiled student.
        teachers: the profiled teachers.
    """

    context: WorkerContext
    student: ProfiledModel
    teachers: Sequence[KnownTeacher]

    def __post_init__(self) -> None:
        """Begin without any cut."""
        self._found: dict[tuple[Program, tuple[int, ...]], _Cuts] = {}

    def cut(self, config: PipelineConfig, order: Schedule) -> JointNets:
        """Cut all nets for an order of the student. Every worker must call this.

        Args:
            config: the pipeline's.
            order: the student's, for any costs.

        Raises:
            ModelError: the nets cannot be cut so.
            ConfigError: a teacher's cut makes more stages than there are devices.
        """
        program, context = order.program, self.context
        at = self._student_boundaries(config, program)
        key = program, at
        if key not in self._found:
            student = cut_and_measure(config, program, context, self.student, at)
            cuts = tuple(_cut_teachers(self.teachers, student, program))
            stages = _teacher_costs(cuts, context)
            model = replace(
                student,
                modules=(*(m for x in cuts for m in x.modules), *student.modules),
                costs=replace(student.costs, stages=(*stages, *student.costs.stages)),
                teachers=cuts,
            )
            self._found[key] = model, student
        model, student = self._found[key]
        own = _frozen(config, order, student).program
        program = _joint_program(own, model.teachers, whole_batch=config.whole_batch)
        return JointNets(program, model, student)

    def _student_boundaries(
        self, config: PipelineConfig, program: Program
    ) -> tuple[int, ...]:
        """Return the layers at which the student's stages begin.

        All nets together balance, where the configuration does not say the cut.

        Raises:
            ModelError: the student cannot be cut as asked.
        """
        known, context = self.student, self.context
        for teacher in self.teachers:
            if teacher.teacher.moves:
                known = _with_forwards_of(teacher, known, config.num_microbatches)
        free = [
            x for x in self.teachers if x.teacher.cut is None and not x.teacher.moves
        ]
        is_single = program.num_stages == context.layout.num_devices
        is_enough = len(known.captured.layers) >= program.num_stages
        if config.cut is not None or not (free and is_single and is_enough):
            return balanced_boundaries(known, program, config, context)
        student_s = [config.num_microbatches * x for x in known.profile.layer_s]
        return joint_balance(student_s, free[0].layer_s, program.num_stages).student


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


def _with_forwards_of(
    teacher: KnownTeacher, known: ProfiledModel, num_microbatches: int
) -> ProfiledModel:
    """Add the forwards of a teacher to the layers of the student that it follows."""
    layers = [*known.profile.layers]
    holder = {
        name: i
        for i, layer in reversed([*enumerate(known.captured.layers)])
        for name in layer.parameters
    }
    at = 0
    for layer, seconds in zip(teacher.captured.layers, teacher.layer_s, strict=True):
        at = max((holder.get(name, 0) for name in layer.parameters), default=at)
        more_s = layers[at].forward_s + seconds / num_microbatches
        layers[at] = replace(layers[at], forward_s=more_s)
    return replace(known, profile=replace(known.profile, layers=tuple(layers)))


def _cut_teachers(
    teachers: Sequence[KnownTeacher], student: CutModel, program: Program
) -> list[CutTeacher]:
    """Cut all teachers, each where it makes up for what the devices have already.

    Args:
        teachers: the profiled teachers; those that follow the student are cut where it
            is.
        student: the student's stages and their costs.
        program: the student's.

    Raises:
        ModelError: a teacher that follows the student cannot be cut where it is.
        ConfigError: a teacher's cut makes more stages than there are devices.
    """
    devices = [stage.device for stage in program.stages]
    device_s = [0.0] * program.num_devices
    for number, cost in enumerate(student.costs.stages):
        each_s = cost.forward_s + cost.input_grad_s + cost.weight_grad_s
        device_s[devices[number]] += program.num_microbatches_of(number) * each_s
    cuts = {}
    for known in sorted(teachers, key=lambda x: not x.teacher.moves):
        if known.teacher.moves:
            places = beside_student(known, student.modules, devices)
        else:
            places = _balanced_places(known, device_s)
        edges = (0, *places.boundaries, len(known.layer_s))
        for i, device in enumerate(places.devices):
            device_s[device] += sum(known.layer_s[edges[i] : edges[i + 1]])
        cuts[known.name] = CutTeacher.of(known, places)
    return [cuts[known.name] for known in teachers]


def _balanced_places(known: KnownTeacher, device_s: Sequence[float]) -> TeacherPlaces:
    cut_at = known.teacher.cut
    if cut_at is None:
        return on_devices(cut_teacher(device_s, known.layer_s), len(known.layer_s))
    if len(cut_at) >= len(device_s):
        raise ConfigError(
            f"teacher {known.name!r}: {len(cut_at)} cut points make "
            f"{len(cut_at) + 1} stages, and there are {len(device_s)} devices with one "
            f"stage of it each: name at most {len(device_s) - 1} modules"
        )
    return on_devices(boundaries_from_names(known.captured, cut_at), len(known.layer_s))


_NUM_REPEATS: Final = 3  # of a body, to predict a step's time among others


def _joint_program(
    student: Program, cuts: Sequence[CutTeacher], *, whole_batch: bool
) -> Program:
    """Return the program of all nets: the teachers' stages come first.

    Args:
        student: the student's.
        cuts: the teachers' stages.
        whole_batch: whether the loss is over the whole batch (op L).
    """
    first = sum(len(cut.modules) for cut in cuts)
    last = first + student.num_stages - 1
    flows: list[tuple[int, int]] = []
    read: list[tuple[int, int]] = []
    whole: list[tuple[int, int]] = []
    begin = 0
    for cut in cuts:
        end = begin + len(cut.modules) - 1
        flows += [(stage, stage + 1) for stage in range(begin, end)]
        read.append((end, last))
        if cut.known.teacher.whole_batch and not whole_batch:
            whole.append((end, last))
        begin = end + 1
    teachers = [cut.known.teacher for cut in cuts]
    most = max(teacher.num_ahead for teacher in teachers)
    repeats = most or any(teacher.delay for teacher in teachers)
    return replace(
        student,
        nets=(
            *(Net(cut.name, cut.known.num_microbatches) for cut in cuts),
            *student.nets,
        ),
        stages=(*(x for cut in cuts for x in cut.stages(first)), *student.stages),
        flows=(*flows, *((first + a, first + b) for a, b in student.flows), *read),
        num_steps=most + _NUM_REPEATS if repeats else 1,
        copies=tuple(tuple(first + x for x in group) for group in student.copies),
        whole_batch_flows=frozenset(whole),
    )


def _teacher_costs(
    cuts: Sequence[CutTeacher], context: WorkerContext
) -> list[StageCost]:
    """Return the costs of the teachers' stages. Every worker must call this.

    Updates are measured, each on the worker that holds the stage.

    Args:
        cuts: the teachers' stages.
        context: this worker's context.
    """
    costs = [cost for cut in cuts for cost in _stage_costs(cut)]
    stages = [
        (cut.known.teacher.update, place, module)
        for cut in cuts
        for place, module in zip(cut.places.devices, cut.modules, strict=True)
    ]
    own = {
        str(number): _measured_s(update, module, context.world.device)
        for number, (update, place, module) in enumerate(stages)
        if update is not None and place == context.layout.device
    }
    parts = context.world.gather_json(own, "costs of the teachers' updates")
    return [
        replace(cost, update_s=max(float(part.get(str(i), 0.0)) for part in parts))
        for i, cost in enumerate(costs)
    ]


def _stage_costs(cut: CutTeacher) -> Iterator[StageCost]:
    output = pytree.tree_leaves(cut.known.output)
    stages = added_up(cut.known.profile.layers, cut.places.boundaries)
    for module, (_, cost) in zip(cut.modules, stages, strict=True):
        if module is cut.modules[-1]:
            num_bytes = sum(x.nbytes for x in output if isinstance(x, Tensor))
            cost = replace(cost, output_bytes=num_bytes)
        state = [*module.parameters(), *module.buffers()]
        yield replace(cost, weight_bytes=sum(x.nbytes for x in state))


def _measured_s(
    update: FollowerUpdate, module: StageModule, device: torch.device
) -> float:
    """Return the seconds of a second update, of copies of a stage's weights."""
    copies = {n: x.detach().to(device).clone() for n, x in module.named_parameters()}
    followed = {name: torch.ones_like(x) for name, x in copies.items()}
    follower = Follower(update, Pairs(copies, followed))
    found: list[float] = []
    for step, span in enumerate(timed_rounds(found, device, 1)):
        with span:
            follower.update(step)
    return found[0]
