"""Cuts a student and its teachers over the same devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hocket.core.program import Program
from hocket.errors import ConfigError
from hocket.model.stages.cut import boundaries_from_names
from hocket.planner.teachers.joint_balance import cut_teacher, joint_balance
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.cut.cut_model import CutModel, balanced_boundaries
from hocket.run.tune.cut.profiled_model import ProfiledModel
from hocket.run.tune.teachers.stages import (
    CutTeacher,
    KnownTeacher,
    TeacherPlaces,
    beside_student,
    on_devices,
)


def student_boundaries(
    config: PipelineConfig,
    program: Program,
    context: WorkerContext,
    known: ProfiledModel,
    teachers: Sequence[KnownTeacher],
) -> tuple[int, ...]:
    """Return the layers at which the student's stages begin.

    All nets together balance, where the configuration does not say the cut.

    Args:
        config: the pipeline's.
        program: the student's.
        context: this worker's context.
        known: the profiled student.
        teachers: the profiled teachers.

    Raises:
        ModelError: the student cannot be cut as asked.
    """
    heavier = known
    for teacher in teachers:
        if teacher.teacher.moves:
            heavier = _with_forwards_of(teacher, heavier, config.num_microbatches)
    free = [x for x in teachers if not x.teacher.moves and x.teacher.cut is None]
    is_single = program.num_stages == context.layout.num_devices
    is_enough = len(known.captured.layers) >= program.num_stages
    if config.cut is not None or not (free and is_single and is_enough):
        return balanced_boundaries(
            heavier, program, config.cut, context.world, context.layout
        )
    student_s = [config.num_microbatches * x for x in heavier.profile.layer_s]
    return joint_balance(student_s, free[0].layer_s, program.num_stages).student


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


def cut_teachers(
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
