"""Compare ways to train a student with a teacher, with the teacher ahead and without.

What is compared, on all devices of a cluster:

    pipelines        both nets cut over the devices of each replica
      ahead          the teacher's forwards of a later batch fill the student's waits
      same batch     they come before the student's own, or beside them
    data parallel    no net is cut into stages; FSDP shards the student
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Final

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.program import Net, Program, Stage
from hocket.core.schedule import Schedule
from hocket.core.simulate import long_step_s, simulate
from hocket.draw.quantity import counted, seconds, short
from hocket.errors import PlanError, ShapeError
from hocket.passes.fill_with import fill_with
from hocket.planner.balance import Balancer, JointCut, joint_balance
from hocket.planner.candidate import DDP, FSDP, ZERO_1, Candidate, Outcome
from hocket.planner.cluster import Cluster
from hocket.planner.predict import Predictor
from hocket.planner.replicas.data_parallel import data_parallel_outcome
from hocket.planner.stages import add_layers, stage_costs
from hocket.planner.work import LayerCost, ModelCosts
from hocket.schedules import make_schedule

_LEAST_SPEEDUP: Final = 1.02  # of a pipeline over data parallelism, to recommend it
_MAX_MICROBATCHES_PER_DEVICE: Final = 4  # with more, the bubble is small
_TEACHER: Final = "teacher"  # the net's name
_UPDATE_TENSORS: Final = 2  # a momentum update reads the student's weights and its own


@dataclass(frozen=True, slots=True)
class TeacherJob:
    """A student and its teacher.

    Args:
        student: the costs of the net that is trained.
        teacher: the costs of the net without backwards.
        delay: the delay of a momentum teacher's weights; None for a frozen one.
        batch_size: samples per step, over all replicas.
        look_ahead: by how many batches it is ahead; as `fill_with` chooses when None.
    """

    student: ModelCosts
    teacher: ModelCosts
    delay: int | None
    batch_size: int
    look_ahead: int | None = None


@dataclass(frozen=True, slots=True)
class TeacherPipeline:
    """A pipeline of both nets, and its predicted times.

    Args:
        schedule: the student's schedule.
        num_devices: the devices of one replica.
        num_replicas: copies of the pipeline.
        num_microbatches: the student's microbatches.
        num_parts: the teacher's microbatches for each of these.
        cut: where the stages of both nets begin.
        step_s: seconds of a step, with the teacher as far ahead as its delay allows.
        same_batch_s: the same with the teacher of the same batch.
        peak_bytes: the most that a device holds.
    """

    schedule: str
    num_devices: int
    num_replicas: int
    num_microbatches: int
    num_parts: int
    cut: JointCut
    step_s: float
    same_batch_s: float
    peak_bytes: float

    def __str__(self) -> str:
        """Name it in a sentence."""
        return (
            f"{self.schedule} on {self.num_devices}x{self.num_replicas} devices with "
            f"{counted(self.num_microbatches, 'microbatch')}"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The fastest ways that fit the memory; None where none does.

    Args:
        pipeline: the fastest pipeline.
        data_parallel: the student's part of the fastest plain data parallelism.
        data_parallel_s: its seconds of a step, the teacher's part included.
    """

    pipeline: TeacherPipeline | None
    data_parallel: Outcome | None
    data_parallel_s: float

    @property
    def sentence(self) -> str:
        """What to do, with the numbers."""
        best, plain = self.pipeline, self.data_parallel
        if best is None and plain is None:
            return "Neither a pipeline nor data parallelism fits the memory."
        plain_s = self.data_parallel_s
        if plain is not None and (
            best is None or plain_s <= best.step_s * _LEAST_SPEEDUP
        ):
            rival = "no pipeline fits" if best is None else f"{best} {_takes(best)}"
            end = "." if best is None else ": this teacher is not worth a pipeline."
            return (
                f"{plain.candidate.schedule} with neither net cut into stages takes "
                f"{seconds(plain_s)} a step, and {rival}{end}"
            )
        assert best is not None
        rival = (
            "data parallelism does not fit"
            if plain is None
            else f"data parallelism takes {seconds(plain_s)}"
        )
        gain = short(best.same_batch_s / best.step_s)
        versus = ""
        if best.same_batch_s > best.step_s:
            versus = f", {gain} times as fast as with the teacher of the same batch"
        return f"{best} {_takes(best)}{versus}; {rival}."


def _takes(pipeline: TeacherPipeline) -> str:
    return f"takes {seconds(pipeline.step_s)} a step"


def compare(
    job: TeacherJob, cluster: Cluster, schedules: tuple[str, ...] = ("1f1b", "gpipe")
) -> Comparison:
    """Predict pipelines and data parallelism, and return the fastest that fit.

    Each device has one stage of the student. A frozen teacher is cut where both nets
    together balance; one that follows the student is cut where the student is. A
    teacher's microbatch is halved until its forward takes at most half as long as the
    student's, or until it holds one sample. The bytes of the teacher's outputs are not
    counted.

    Args:
        job: both nets.
        cluster: the devices.
        schedules: the names of the student's schedules to consider.

    Raises:
        PlanError: a teacher that follows has more layers than the student.
    """
    if job.delay is not None and len(job.teacher.layers(1)) > len(
        job.student.layers(1)
    ):
        raise PlanError(
            f"the teacher follows the student, but has {len(job.teacher.layers(1))} "
            f"layers, and the student {len(job.student.layers(1))}: each layer of the "
            "teacher needs one of the student"
        )
    best: TeacherPipeline | None = None
    for size in sorted(_sizes(job, cluster), key=lambda size: size.work_s):
        for name in schedules:
            if best is None or size.work_s < best.step_s:
                found = _pipeline(job, cluster, size, name)
                if found and (best is None or found.step_s < best.step_s):
                    best = found
    return Comparison(best, *_data_parallel(job, cluster))


def predict_pipeline(
    job: TeacherJob,
    cluster: Cluster,
    schedule: str,
    num_devices: int,
    num_microbatches: int,
) -> TeacherPipeline | None:
    """Predict one pipeline, cut as `compare` cuts it.

    Args:
        job: both nets.
        cluster: the devices.
        schedule: the name of the student's schedule.
        num_devices: the devices of one replica.
        num_microbatches: the student's; a replica's samples that they do not divide are
            rounded up in each.

    Returns:
        The pipeline; None if the schedule refuses these numbers or does not fit.
    """
    samples = job.batch_size * num_devices // cluster.num_devices
    each = -(-samples // num_microbatches)
    size = _size(job, cluster, num_devices, num_microbatches, each)
    return _pipeline(job, cluster, size, schedule)


@dataclass(frozen=True, slots=True)
class _Size:
    """The numbers of a pipeline, and its cuts.

    Args:
        num_devices: the devices of one replica.
        num_replicas: copies of the pipeline.
        num_microbatches: the student's microbatches.
        num_parts: the teacher's for each of these.
        cut: where the stages of both nets begin.
        student: the student's layers for a microbatch.
        teacher: the teacher's for one of its own.
        work_s: what the slowest device works in a step.
    """

    num_devices: int
    num_replicas: int
    num_microbatches: int
    num_parts: int
    cut: JointCut
    student: tuple[LayerCost, ...]
    teacher: tuple[LayerCost, ...]
    work_s: float


def _sizes(job: TeacherJob, cluster: Cluster) -> Iterator[_Size]:
    num = cluster.num_devices
    for p in range(2, min(num, len(job.student.layers(1))) + 1):
        samples = job.batch_size * p // num
        for m in range(1, min(samples, _MAX_MICROBATCHES_PER_DEVICE * p) + 1):
            if num % p == 0 and samples % m == 0:
                yield _size(job, cluster, p, m, samples // m)


def _size(job: TeacherJob, cluster: Cluster, p: int, m: int, samples: int) -> _Size:
    student = job.student.layers(samples)
    whole_s = sum(layer.forward_s for layer in student)
    num_parts = 1
    while num_parts < samples:
        part = job.teacher.layers(-(-samples // num_parts))
        if 2 * sum(layer.forward_s for layer in part) <= whole_s:
            break
        num_parts *= 2
    num_parts = min(num_parts, samples)
    teacher = job.teacher.layers(-(-samples // num_parts))
    student_s = [m * (layer.forward_s + layer.backward_s) for layer in student]
    teacher_s = [m * num_parts * layer.forward_s for layer in teacher]
    if job.delay is None:
        cut = joint_balance(student_s, teacher_s, p)
    else:
        cut = _same_cut(student, teacher, p, num_parts, cluster.hop)
    work_s = max(cut.device_s(student_s, teacher_s))
    return _Size(
        p, cluster.num_devices // p, m, num_parts, cut, student, teacher, work_s
    )


def _same_cut(
    student: Sequence[LayerCost],
    teacher: Sequence[LayerCost],
    num_stages: int,
    num_parts: int,
    link: Link,
) -> JointCut:
    """Cut both nets alike; the student may have more layers, such as a predictor."""
    added_s = [num_parts * layer.forward_s for layer in teacher]
    added_s += [0.0] * (len(student) - len(teacher))
    both = [
        replace(layer, forward_s=layer.forward_s + more_s)
        for layer, more_s in zip(student, added_s, strict=True)
    ]
    boundaries = Balancer.of(both, link).cut(num_stages)
    return JointCut(boundaries, tuple(min(b, len(teacher)) for b in boundaries))


def _pipeline(
    job: TeacherJob, cluster: Cluster, size: _Size, name: str
) -> TeacherPipeline | None:
    """Return a pipeline's times; None if it is refused or does not fit."""
    p, m = size.num_devices, size.num_microbatches
    try:
        order = make_schedule(
            name, num_devices=p, num_microbatches=m, num_replicas=size.num_replicas
        )
    except ShapeError:
        return None
    stages = stage_costs(
        size.student,
        size.cut.student,
        recomputes=False,
        update_s_per_byte=job.student.update_s_per_byte,
    )
    teacher = dict(_teacher_stages(job, size))
    costs = Costs(
        (*teacher.values(), *stages),
        link=cluster.inside,
        links=cluster.pipeline_links(p, size.num_replicas),
        reduce_link=cluster.reduce_link(p, size.num_replicas),
    )
    program = _program(order, size, tuple(teacher), job.delay)
    far = None if job.look_ahead is None else {_TEACHER: job.look_ahead}
    ahead = fill_with(order, program, _TEACHER, costs=costs, look_ahead=far)
    program = _program(order, size, tuple(teacher), 0)  # as of a momentum teacher
    same_batch = fill_with(order, program, _TEACHER, costs=costs)
    timeline = simulate(ahead, costs)
    if timeline.most_bytes > cluster.memory_bytes:
        return None
    return TeacherPipeline(
        name,
        p,
        size.num_replicas,
        m,
        size.num_parts,
        size.cut,
        long_step_s(ahead, costs),
        long_step_s(same_batch, costs),
        timeline.most_bytes,
    )


def _teacher_stages(job: TeacherJob, size: _Size) -> Iterator[tuple[int, StageCost]]:
    """Yield the devices that have layers of the teacher, each with its stage's cost."""
    layers = size.teacher
    edges = (0, *size.cut.teacher, len(layers))
    update_s_per_byte = 0.0 if job.delay is None else job.student.update_s_per_byte
    for device, (begin, end) in enumerate(pairwise(edges)):
        if begin == end:
            continue
        whole = add_layers(
            layers[begin:end], layers[end] if end < len(layers) else None
        )
        weights = {x.name: x for layer in layers[begin:end] for x in layer.weights}
        num_bytes = sum(x.num_bytes for x in weights.values())
        yield (
            device,
            StageCost(
                forward_s=whole.forward_s,
                output_bytes=whole.output_bytes,
                activation_bytes=whole.forward_work_bytes,
                weight_bytes=num_bytes,
                update_s=_UPDATE_TENSORS * num_bytes * update_s_per_byte,
            ),
        )


def _program(
    order: Schedule, size: _Size, devices: tuple[int, ...], delay: int | None
) -> Program:
    """Return the program of both nets, with steps enough for a body."""
    student, count = order.program, len(devices)
    teacher = (
        Stage(_TEACHER, d, False, delay or 0, () if delay is None else (count + d,))
        for d in devices
    )
    num_parts = size.num_microbatches * size.num_parts
    last = count + student.num_stages - 1
    return replace(
        student,
        nets=(Net(_TEACHER, num_parts), *student.nets),
        stages=(*teacher, *student.stages),
        flows=(
            *((stage, stage + 1) for stage in range(count - 1)),
            *((count + a, count + b) for a, b in student.flows),
            (count - 1, last),
        ),
        num_steps=1 + (1 if delay is None else delay),
    )


def _data_parallel(job: TeacherJob, cluster: Cluster) -> tuple[Outcome | None, float]:
    """Return the fastest data parallelism that fits, and its seconds of a step."""
    num = cluster.num_devices
    predictor = Predictor(job.student, cluster, job.batch_size)
    best: Outcome | None = None
    best_s = inf
    samples = max(1, job.batch_size // num)
    update_s_per_byte = 0.0 if job.delay is None else job.student.update_s_per_byte
    for m in filter(lambda m: samples % m == 0, range(1, samples + 1)):
        layers = job.teacher.layers(samples // m)
        forward_s = m * sum(layer.forward_s for layer in layers)
        weights = {x.name: x.num_bytes for layer in layers for x in layer.weights}
        work_bytes = add_layers(layers, None).forward_work_bytes
        weight_bytes = sum(weights.values())
        added_bytes = weight_bytes + work_bytes
        added_s = forward_s + _UPDATE_TENSORS * weight_bytes * update_s_per_byte
        for name in (DDP, ZERO_1, FSDP):
            shards = num if name == FSDP else 1
            candidate = Candidate(name, 1, num // shards, 1, m, num_shards=shards)
            outcome = data_parallel_outcome(predictor, candidate)
            fits = outcome.peak_bytes + added_bytes <= cluster.memory_bytes
            if fits and outcome.step_s + added_s < best_s:
                best, best_s = outcome, outcome.step_s + added_s
    return best, best_s
