"""Makes the order of a student and its teachers, for measured times.

All workers profile all nets, make the student's order of one step, and cut all nets
together; where no schedule is named, they do so for each that could be. Rank 0 fills
the waits of the order with the teachers' forwards, chooses the fastest if there are
several, and broadcasts the result.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hocket.core.op import Kind
from hocket.core.schedule import Schedule
from hocket.core.simulate import long_step_s, simulate
from hocket.errors import ConfigError, FitError, ModelError, PlanError
from hocket.model.capture.capture import capture
from hocket.model.capture.captured import enough_layers
from hocket.planner.recompute import recomputing
from hocket.run.cluster.broadcast import decide_on_rank_0
from hocket.run.cluster.layout import Layout
from hocket.run.cluster.world import World
from hocket.run.data.batch import count_samples, digest, to_capture
from hocket.run.engine.plan import short_hash
from hocket.run.engine.programs.net_setup import example_output
from hocket.run.engine.same_everywhere import refuse_differences
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.tune.choose import no_order_fits, search_of
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.cut.cut_model import CutModel, messages_of
from hocket.run.tune.cut.profiled_model import (
    ProfiledModel,
    forwards_of,
    profile_model,
)
from hocket.run.tune.order import configured_order
from hocket.run.tune.teachers.filled import JointNets, NetCutter, filled_order
from hocket.run.tune.teachers.stages import KnownTeacher, check_followed
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
        usual = "gpipe" if config.whole_batch else "1f1b"
        named = replace(config, schedule=usual, stages_per_device=None)
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
    microbatch = config.microbatches()[0]
    batch_size = count_samples(config.example)
    outputs = [
        known.output_for_loss(microbatch, batch_size, over_batch=config.whole_batch)
        for known in teachers
    ]
    profiled = profile_model(config, world, num_stages, outputs)
    if is_chosen:
        messages = messages_of(profiled, config, context)
        profiled = replace(profiled, messages=messages)
    cutter = NetCutter(context, profiled, teachers)
    if is_chosen:
        return _choose_order(config, context, profiled, cutter)
    nets = cutter.cut(config, student)
    most = config.memory_of(world)

    def decide() -> str:
        return str(filled_order(config, layout, student, nets, most))

    text = decide_on_rank_0(world, decide, "order with the teachers")
    return config, Schedule.parse(text), nets.model


def _known(
    name: str, teacher: Teacher, config: PipelineConfig, world: World, num_stages: int
) -> KnownTeacher:
    """Capture a teacher, run it on the example, and profile its forwards."""
    config.report(f"capturing teacher {name}")
    num_microbatches = teacher.num_microbatches or config.num_microbatches
    if world.device.type != "cpu":
        teacher.net.cpu()  # each worker moves its own stages to its device
    teacher = replace(teacher, mode="train" if teacher.is_training else "eval")
    if not (teacher.is_training and teacher.net.training):
        teacher.net.train(teacher.is_training)  # as what will run as it is does, too
    microbatch, args, kwargs = to_capture(
        teacher.net,
        config.example,
        num_microbatches * config.num_pipelines,
    )
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
    trains = teacher.is_training
    profile = forwards_of(captured, microbatch, config, world, training=trains)
    output = example_output(captured, training=trains)
    return KnownTeacher(name, teacher, captured, profile, output, num_microbatches)


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


def _choose_order(
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
    timeline = simulate(filled, costs)
    peaks = [timeline.peak_bytes(d) for d in range(filled.program.num_devices)]
    if round(max(peaks)) > most:
        what = "no order of the student with its teachers"
        raise no_order_fits(what, str(config.schedule), peaks, most)
    return long_step_s(filled, costs), filled
