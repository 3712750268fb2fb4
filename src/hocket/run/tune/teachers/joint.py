"""Makes the order of a student and its teachers, for measured times.

All workers profile all nets, make the student's order of one step, and cut all nets
together; where no schedule is named, they do so for each that could be. Rank 0 fills
the waits of the order with the teachers' forwards, chooses the fastest if there are
several, and broadcasts the result.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from hocket.core.schedule import Schedule
from hocket.errors import ConfigError
from hocket.model.capture.capture import capture
from hocket.model.capture.captured import enough_layers
from hocket.model.profile.forwards import passes_of, profile_forwards
from hocket.run.cluster.broadcast import decide_on_rank_0
from hocket.run.cluster.world import World
from hocket.run.data.batch import count_samples, digest, to_capture
from hocket.run.engine.plan import short_hash
from hocket.run.engine.programs.net_setup import example_output
from hocket.run.engine.same_everywhere import refuse_differences
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.cut.cut_model import CutModel, with_messages
from hocket.run.tune.cut.profiled_model import load_or_measure, profile_model
from hocket.run.tune.order import configured_order
from hocket.run.tune.profile_workers import measured_together
from hocket.run.tune.teachers.choose import choose_order
from hocket.run.tune.teachers.filled import NetCutter, filled_order
from hocket.run.tune.teachers.stages import (
    KnownTeacher,
    check_followed,
)
from hocket.run.tune.teachers.teacher import Teacher
from hocket.run.tune.timed_order import has_free_stages
from hocket.run.weights.momentum import Momentum

_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
_LOW: Final = 0.9  # a momentum below it makes a delay of 1 felt


def joint_order(
    config: PipelineConfig, context: WorkerContext
) -> tuple[PipelineConfig, Schedule, CutModel]:
    """Make the order of all nets. Every worker must call this, and gets the same.

    Args:
        config: a configuration with teachers.
        context: this worker's context, with a transport that is used for nothing else.

    Returns:
        The configuration, with the name of the schedule if that was chosen; the order;
        and the stages of all nets with their costs.

    Raises:
        ConfigError: the steps of the student's order overlap; or the teachers'
            microbatches cannot be played.
        FitError: no order that could be chosen, or made for the costs, fits the memory.
        ModelError: a model cannot be captured or cut as asked; or a teacher that
            follows the student has a parameter that the student lacks.
    """
    layout, world = context.layout, context.world
    is_chosen = config.schedule == "auto" or has_free_stages(config)
    named = config
    if is_chosen:  # for the number of its nets and stages
        named = replace(config, schedule="1f1b", stages_per_device=None)
    student = configured_order(named, layout)
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
    if is_chosen:
        profiled = with_messages(profiled, config, context)
    cutter = NetCutter(context, profiled, teachers)
    if is_chosen:
        return choose_order(config, context, profiled, cutter)
    nets = cutter.cut(config, student)
    most = config.memory_of(world)

    def decide() -> str:
        return str(filled_order(config, layout, student, nets, most))

    text = decide_on_rank_0(world, decide, "order with the teachers")
    return config, Schedule.parse(text), nets.model


def _known(
    name: str,
    teacher: Teacher,
    config: PipelineConfig,
    world: World,
    num_stages: int,
) -> KnownTeacher:
    """Capture a teacher, run it on the example, and profile its forwards."""
    num_microbatches = teacher.num_microbatches or config.num_microbatches
    microbatch, args, kwargs = to_capture(
        teacher.net, config.example, num_microbatches * config.num_replicas
    )
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
    depends_on = {"passes": passes_of(training=teacher.is_training)}
    profile = load_or_measure(captured, config, world, together, depends_on)
    return KnownTeacher(
        name,
        teacher,
        captured,
        profile,
        example_output(captured, training=teacher.is_training),
        num_microbatches,
    )


class LowMomentumWarning(UserWarning):
    """A delayed teacher moves so fast that its delay changes the training."""


def refuse_unfillable(config: PipelineConfig, student: Schedule) -> None:
    """Refuse orders that cannot be filled, and settings that need another order.

    Args:
        config: a configuration with teachers.
        student: the student's order.

    Raises:
        ConfigError: says the way out.
    """
    if student.body or any(stage.delay for stage in student.program.stages):
        raise ConfigError(
            f"the steps of schedule {config.schedule!s:.40} overlap, and a teacher's "
            "forwards fill the waits of an order that ends each step before the next "
            'begins: take one such as "1f1b", "gpipe" or "zb-h1"'
        )
    (net,) = student.program.nets
    for name, teacher in config.teachers.items():
        _check_counts(config, name, teacher)
        if name == net.name or not _NAME.fullmatch(name):
            raise ConfigError(
                f"a teacher is named {name!r}: use letters, digits, _ and -, and not "
                f"{net.name!r}, which is the student's net in the schedule"
            )


def _check_counts(config: PipelineConfig, name: str, teacher: Teacher) -> None:
    own = config.num_microbatches
    asked = teacher.num_microbatches or own
    reads_batch = teacher.whole_batch or config.whole_batch
    if max(own, asked) % min(own, asked) and not reads_batch:
        raise ConfigError(
            f"teacher {name!r} has {asked} microbatches, and the student {own}: take a "
            "multiple, or a number that divides it; or whole_batch=True, where the "
            "loss reads the outputs of all samples"
        )


def warn_of_low_momentum(teachers: Mapping[str, Teacher]) -> None:
    """Warn where a delay is not small beside the age of the averaged weights.

    The delayed teacher is behind the present one by `1 - m` of the distance between the
    student and the teacher before the update.

    Args:
        teachers: by name.
    """
    for name, teacher in teachers.items():
        if not teacher.delay or not isinstance(teacher.update, Momentum):
            continue
        m = teacher.update.at(0)
        if m < _LOW:
            warnings.warn(
                f"teacher {name!r} has delay {teacher.delay} and a momentum of {m:g}: "
                f"each update moves it by {1 - m:.0%} of its distance to the student, "
                "and so much is a forward behind for each update of delay. The mean "
                f"age of what it averages is {m / (1 - m):.1f} updates, to which the "
                f"delay adds {teacher.delay} (at 0.996: 249). Take delay=0, or a "
                "larger momentum",
                LowMomentumWarning,
                stacklevel=2,
            )
