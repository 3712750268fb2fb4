"""`hocket.plan`: predicts training on devices that need not be present."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket import cuda
from hocket.core.hardware import Hardware
from hocket.errors import ConfigError, PlanError
from hocket.model.capture.capture import capture
from hocket.model.capture.captured import enough_layers
from hocket.model.profile.work import counted_work
from hocket.model.stages.outline import copied
from hocket.model.trace.state import model_fault, refuse_no_values
from hocket.model.weights.given import make_hollow
from hocket.options import SHORT_WEIGHTS, PrecisionName
from hocket.planner.cluster import Cluster
from hocket.planner.rank import PlanConfig, Progress, Search, rank
from hocket.planner.ranking.report import Ranking
from hocket.planner.teachers.compare import TeacherJob, compare
from hocket.planner.work import ModelCosts
from hocket.run.cluster.world import World, single_process_world
from hocket.run.data.batch import Microbatch, apart, to_capture
from hocket.run.data.cut_checks import refuse_shared
from hocket.run.data.loss import TOTAL, LossFunction, loss_fault, losses_of
from hocket.run.device.memory import host_bytes
from hocket.run.diagnostics.startup import StartupProgress, StartupReporter
from hocket.run.tune.link_costs import measure_ring
from hocket.run.tune.profile_workers import profile_workers, shares_cores
from hocket.run.tune.teachers.teacher import Teacher
from hocket.run.tune.trial_runs import ProfileConfig, resized
from hocket.run.weights.settings import OptimizerFactory, TrainingConfig
from hocket.signatures import takes_fields_of


@dataclass(frozen=True, slots=True)
class _Arguments(PlanConfig):
    model: nn.Module
    batch: Any
    loss: LossFunction | None = None
    _: KW_ONLY
    optimizer: OptimizerFactory = torch.optim.AdamW
    teachers: Mapping[str, Teacher] = field(default_factory=dict)
    world: World | None = None
    progress: Progress | None = None


@takes_fields_of(_Arguments)
def plan(config: _Arguments) -> Ranking:
    """Predict every way to train a model on so many devices; the best first.

    With `hardware`, nothing is run and no device is needed: seconds come from the
    FLOPs and bytes of every operator. Without it, the model is profiled here, on this
    machine's GPU or CPU, and every device is assumed to be equal to it; some cuts are
    also run, to measure their ops in place.

    Args:
        config: not an argument of its own: its fields are the arguments,
            `plan(model, batch, loss, num_devices=..., ...)`. Those not named here are
            the fields of `hocket.PlanConfig`.
        model: any module; on the meta device it takes no memory.
        batch: an example `(inputs, targets)`, as for `Pipeline`.
        loss: as for `Pipeline`; the sum of the outputs when not given.
        optimizer: as for `Pipeline`; AdamW when not given.
        teachers: as for `Pipeline`. The ranking is of the model alone; a note for each
            teacher compares pipelines of both nets, with the teacher ahead and with
            that of the same batch, and data parallelism, and says which to take. The
            loss, which reads their outputs, is not counted. Needs `hardware`.
        world: the job of this process, all of whose workers call this: as many as
            `num_devices`. They then measure together, with real messages. By default
            this process represents all. Either way a process on a CPU keeps the memory
            that it frees from then on (HOCKET_KEEP_FREED_MEMORY=0: it does not).
        progress: called with the number of candidates done, and of all. Without it,
            the logger `hocket` says after two seconds what is done.

    Returns:
        A ranking of all candidates; it prints as a table, the choice and its picture.

    Raises:
        PlanError: a name is unknown; the message gives the nearest. Or the job has
            another number of workers, or its links are named; or there are teachers
            and no `hardware`.
        CaptureError: the model cannot be captured.
        DataError: the batch is no pair, or its tensors disagree.
        ConfigError: there is no such argument; or the model is no module, the loss or
            the optimizer no function.
    """
    _check_functions(config)
    settings = TrainingConfig(optimizer=config.optimizer)
    if config.precision == SHORT_WEIGHTS:
        settings = replace(settings, precision=SHORT_WEIGHTS)
    device = config.device
    _check_world(config)
    if config.teachers and device is None:
        raise PlanError(
            f"teachers {', '.join(config.teachers)} are planned for a kind of device: "
            'name one, such as hardware="v100-32g"; or leave teachers away'
        )
    if device is None:
        why = 'to be measured here; with hardware="..." nothing is run'
        refuse_no_values(config.model, "the model", why)
    else:
        config = replace(config, batch=pytree.tree_map(_with_values, config.batch))
    num_here = config.num_devices // max(1, config.num_nodes)
    cluster = config.cluster(_own_memory(num_here) if device is None else 0)
    model = _with_memory(config.model)
    settings.compute_precision.check_types([model])
    is_leader = config.world is None or config.world.rank == 0
    is_heard = config.progress is not None
    with StartupReporter(None, is_leader and not is_heard) as reporter:
        reporter(StartupProgress("capturing and measuring the model"))
        if not is_heard:
            said = partial(StartupProgress, "ranking candidates", 0.0)
            config = replace(config, progress=lambda *done: reporter(said(*done)))
        with settings.compute_precision.wide_gradients([model]):
            return _ranked(config, model, settings, cluster)


def _ranked(
    config: _Arguments, model: nn.Module, settings: TrainingConfig, cluster: Cluster
) -> Ranking:
    search, precision = config.search or Search(), config.precision or "float32"
    device = config.device
    part, args, kwargs = to_capture(model, apart(config.batch), 1)
    refuse_shared(model, args, kwargs)
    # What is counted is counted of training; what is measured is cut as it will be.
    captured = capture(model, args, kwargs, both=device is None)
    captured = enough_layers(captured, config.num_devices)
    states = settings.state_bytes(captured.state.trained)
    size = part.num_samples if config.batch_size is None else config.batch_size
    if device is not None:
        counted = None if config.teachers else config.loss
        finish = None if counted is None else _finish(counted, part)
        work: ModelCosts = counted_work(
            captured, device, states, finish=finish, precision=precision
        )
        ranking = rank(work, cluster, size, search, progress=config.progress)
        jobs = _teacher_jobs(config, work, device, precision, size)
        more = (f"With {x}: {compare(job, cluster).sentence}" for x, job in jobs)
        return replace(ranking, notes=(*ranking.notes, *more))
    wanted = ProfileConfig(
        captured,
        part.targets,
        config.loss,
        replace(settings, precision=_measurable(precision)),
        states,
        size,
        config.num_devices,
        search.stages_per_device,
        cluster.hop,
    )
    own = torch.device("cuda" if cuda.is_available() else "cpu")
    workers = config.world or single_process_world(own)
    work, trials = profile_workers(wanted, workers)
    ring = measure_ring(workers)
    cluster = replace(cluster, ring=ring, shares_cores=shares_cores(workers))
    return rank(work, cluster, size, search, trials, config.progress)


def _with_memory(model: nn.Module) -> nn.Module:
    """Return a model on meta as a copy on the host, whose memory is never written.

    The code of a model on meta makes constants there, and not where its inputs are.
    """
    if not any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        return model
    own: nn.Module = copied(model, {})
    make_hollow(own)
    return own


def _with_values(leaf: Any) -> Any:
    """Return zeros for a tensor on meta: only shapes are looked at."""
    is_meta = isinstance(leaf, Tensor) and leaf.is_meta
    return torch.zeros_like(leaf, device="cpu") if is_meta else leaf


def _teacher_jobs(
    config: _Arguments,
    student: ModelCosts,
    device: Hardware,
    precision: str,
    batch_size: int,
) -> Iterator[tuple[str, TeacherJob]]:
    """Yield each teacher's name, and what is to be planned of it and the student."""
    for name, teacher in config.teachers.items():
        net = _with_memory(teacher.net)
        _, args, kwargs = to_capture(net, config.batch, 1)
        captured = capture(net, args, kwargs)
        costs = counted_work(captured, device, {}, precision=precision)
        delay = (teacher.delay or 0) if teacher.moves else None
        yield (name, TeacherJob(student, costs, delay, batch_size, teacher.look_ahead))


def _measurable(precision: str) -> PrecisionName:
    if precision == "tf32":
        raise PlanError(
            "tf32 is how a GPU multiplies float32: name the hardware to plan for it, "
            "or measure with float32, bfloat16 or float16"
        )
    return cast(PrecisionName, precision)  # TrainingConfig refuses others


def _check_functions(config: _Arguments) -> None:
    loss = None if config.loss is None else loss_fault(config.loss)
    if faults := [x for x in (model_fault(config.model), loss) if x]:
        raise ConfigError("; ".join(faults))


def _check_world(config: _Arguments) -> None:
    world = config.world
    if world is None:
        return
    if config.links is not None:
        raise PlanError(
            f"links={config.links!r}: the messages of these workers are measured; "
            "leave links away, or leave world away to plan for other links"
        )
    if config.hardware is not None:
        raise PlanError(
            f"hardware={config.hardware!r} needs no workers: leave world away, or the "
            "hardware"
        )
    if world.world_size != config.num_devices:
        raise PlanError(
            f"the job has {world.world_size} workers, the plan is for "
            f"{config.num_devices} devices: ask for num_devices={world.world_size}, or "
            "leave world away"
        )


def _finish(loss: LossFunction, part: Microbatch) -> Callable[[Any, int], Tensor]:
    """Return the loss of a microbatch of any size, with repeated targets."""

    def finish(output: Any, size: int) -> Tensor:
        wanted = resized(part.targets, part.num_samples, size)
        return losses_of(loss, output, wanted)[TOTAL]

    return finish


def _own_memory(num_sharing: int) -> int:
    here = host_bytes() / max(1, num_sharing)
    return int((cuda.total_bytes(0) if cuda.is_available() else here) * _USABLE)


_USABLE: Final = 0.9
