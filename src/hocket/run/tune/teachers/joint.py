"""Makes the order of a student and its teachers, for measured times.

All workers make the student's order of one step, and profile and cut all nets together.
Rank 0 fills the waits of that order with the teachers' forwards, and sends the result
to all.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch.utils import _pytree as pytree

from hocket.core.check import check
from hocket.core.schedule import Schedule
from hocket.model.capture.capture import capture
from hocket.model.capture.captured import enough_layers
from hocket.model.profile.forwards import profile_forwards
from hocket.model.stages.cut import num_frozen_stages
from hocket.passes.fill_with import fill_with
from hocket.passes.freeze_stages import freeze_stages
from hocket.run.cluster.broadcast import decide_on_rank_0
from hocket.run.cluster.world import World
from hocket.run.data.batch import call_arguments, count_samples, digest, split_batch
from hocket.run.engine.plan import short_hash
from hocket.run.engine.programs.net_setup import example_output
from hocket.run.engine.same_everywhere import refuse_differences
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.tune.build import (
    CutModel,
    cut_and_measure,
    load_or_measure,
    profile_model,
)
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.order import make_order
from hocket.run.tune.profile_workers import measured_together
from hocket.run.tune.teachers.cuts import cut_teachers, student_boundaries
from hocket.run.tune.teachers.program import (
    joint_costs,
    joint_program,
    measure_teacher_updates,
)
from hocket.run.tune.teachers.refusals import (
    refuse_unfillable,
    warn_of_low_momentum,
)
from hocket.run.tune.teachers.stages import (
    KnownTeacher,
    check_followed,
)
from hocket.run.tune.teachers.teacher import Teacher


def joint_order(
    config: PipelineConfig, context: WorkerContext
) -> tuple[Schedule, CutModel]:
    """Make the order of all nets. Every worker must call this, and gets the same.

    Args:
        config: a configuration with teachers.
        context: this worker's context, with a transport that is used for nothing else.

    Returns:
        The order, and the stages of all nets with their costs.

    Raises:
        ConfigError: the student's order is chosen or made for measured times, or its
            steps overlap; or the teachers' microbatches cannot be played.
        ModelError: a model cannot be captured or cut as asked; or a teacher that
            follows the student has a parameter that the student lacks.
    """
    layout, world = context.layout, context.world
    student = make_order(
        config.schedule,
        layout,
        config.num_microbatches,
        config.stages_per_device,
        clips=config.clip_norm is not None,
        whole_batch=config.whole_batch,
    )
    refuse_unfillable(config, student)
    for name, teacher in config.teachers.items():
        if teacher.moves:
            check_followed(name, teacher.net, config.model)
    if world.rank == 0:
        warn_of_low_momentum(config.teachers)
    num_devices, num_stages = layout.num_devices, student.program.num_stages
    teachers = [
        _known(
            name, teacher, config, world, num_stages if teacher.moves else num_devices
        )
        for name, teacher in config.teachers.items()
    ]
    microbatch = config.microbatches()[0].on(world.device)
    batch_size = count_samples(config.example)
    outputs = [
        known.output_for_loss(microbatch, batch_size, over_batch=config.whole_batch)
        for known in teachers
    ]
    profiled = profile_model(config, world, num_stages, outputs)
    boundaries = student_boundaries(
        config, student.program, context, profiled, teachers
    )
    found = cut_and_measure(config, student.program, context, profiled, boundaries)
    # A stage that a teacher follows keeps its op U, so none is frozen then.
    if not any(teacher.moves for teacher in config.teachers.values()):
        student = freeze_stages(student, num_frozen_stages(found.modules))
    cuts = cut_teachers(teachers, found, student.program)
    update_s = measure_teacher_updates(cuts, context)
    joint = replace(
        found,
        modules=(*(m for cut in cuts for m in cut.modules), *found.modules),
        costs=joint_costs(cuts, found.costs, update_s),
        teachers=tuple(cuts),
    )
    program = joint_program(student.program, cuts, whole_batch=config.whole_batch)

    def decide() -> str:
        names = [cut.name for cut in cuts]
        filled = fill_with(student, program, names, costs=joint.costs)
        check(filled)
        return str(filled)

    text = decide_on_rank_0(world, decide, "order with the teachers")
    return Schedule.parse(text), joint


def _known(
    name: str,
    teacher: Teacher,
    config: PipelineConfig,
    world: World,
    num_stages: int,
) -> KnownTeacher:
    """Capture a teacher, run it on the example, and profile its forwards."""
    num_microbatches = teacher.num_microbatches or config.num_microbatches
    microbatch, *_ = split_batch(config.example, num_microbatches * config.num_replicas)
    spec = pytree.tree_structure(call_arguments(config.example[0]))
    args, kwargs = pytree.tree_unflatten(microbatch.leaves, spec)
    if world.device.type != "cpu":
        teacher.net.cpu()  # each worker moves its own stages to its device
    names = {path for path, _ in teacher.net.named_modules()}
    cut_at = config.cut if teacher.moves else teacher.cut
    # The student may have modules that the teacher lacks, such as a predictor.
    known = [x for x in cut_at or () if x in names or not teacher.moves]
    captured = capture(teacher.net, args, kwargs, cut=known)
    if cut_at is None:
        captured = enough_layers(captured, num_stages)
    tensors = dict(captured.state.tensors)
    refuse_differences(
        world,
        {
            f"teacher {name}": captured.digest,
            f"weights of teacher {name}": f"{digest(tensors):08x}",
            f"settings of teacher {name}": short_hash(teacher.text),
        },
    )
    here = microbatch.on(world.device)
    measure = partial(
        profile_forwards,
        captured,
        here.leaves,
        device=world.device,
        training=teacher.is_training,
    )
    together = partial(measured_together, measure, config.compute_precision, world)
    profile = load_or_measure(captured, config, world, together, passes="forward")
    return KnownTeacher(
        name,
        teacher,
        captured,
        profile,
        example_output(captured, training=teacher.is_training),
        num_microbatches,
    )
