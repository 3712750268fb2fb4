"""`hocket.share`: several jobs train on one device at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final

import torch

from hocket import cuda, env
from hocket.errors import ConfigError
from hocket.model.trace.replaced import replaced
from hocket.nearest import nearest
from hocket.run.device.open import open_device
from hocket.sharing.policy import WITH_SHARES, WITH_SLOWDOWNS, Mode
from hocket.sharing.report import ShareReport
from hocket.sharing.running.gate import LOOK_S, JobGates
from hocket.sharing.running.job import Job, check_jobs
from hocket.sharing.running.plan import SharePlan
from hocket.sharing.running.processes.job_process import JobProcess
from hocket.sharing.running.processes.messages import sent_job
from hocket.sharing.running.random_state import (
    THREAD,
    JobRandom,
    default_generator_by_thread,
    default_generators,
    generators_by_thread,
    shared_job,
    starts_seen,
)
from hocket.sharing.running.runner import JobRunner, SharedSettings
from hocket.sharing.running.shared_state import SharedState

_ACTIVE: Final = threading.Lock()  # held while jobs run in threads


def share(
    jobs: Iterable[Job],
    *,
    memory_bytes: int | None = None,
    mode: str = "auto",
    num_iterations: int | None = None,
    device: str | torch.device | None = None,
    processes: bool = False,
) -> ShareReport:
    """Train several jobs on one device, each exactly as it would alone.

    Every job has a thread, a lane of the device and a random state of its own; or a
    process. Its first iterations run in turns, and show how long they take and what
    they hold.

    Sources: Zico (Lim et al., ATC 2021) for `budget`; Wavelet (Wang et al., MLSys 2021)
    for `tick-tock`.

    Args:
        jobs: the jobs; an error in one ends that one alone.
        memory_bytes: the most that all jobs may hold at once; None for no limit.
        mode: `turns`, one iteration at a time; `lag`, half an iteration apart;
            `budget`, each iteration when the sum of the memory curves allows it;
            `tick-tock`, strict waves, and `free`, no gates: both for comparison,
            without regard to `memory_bytes`; `auto`, the best after a short trial.
        num_iterations: after which each job ends; None at the end of its batches.
        device: the device; by default the first GPU, or else the CPU.
        processes: whether each job runs in a process of its own, so that what kills it
            (a fault of the GPU, a signal) or holds the interpreter ends no other one.
            The functions of jobs must be importable, and their arguments plain values.
            On a GPU each process keeps the memory of its peak.

    Returns:
        What happened. `report.check()` raises an error if a job has failed.

    Raises:
        ConfigError: jobs, mode, device, a number or the allocator cannot be used so; or
            the mode does not look at what a job asks for.
        FitError: the memory is less than turns need; names what is needed.
        WaitError: a job's process does not start.
    """
    asked = read_request(
        jobs,
        memory_bytes=memory_bytes,
        mode=mode,
        num_iterations=num_iterations,
        device=device,
        processes=processes,
    )
    are_apart = processes and asked.device.type == "cuda"
    plan = SharePlan(asked.mode, asked.budget_bytes, are_apart, not processes)
    runners = (_in_processes if processes else _in_threads)(asked, plan.gate)
    if plan.gate.stop_error is not None:
        raise plan.gate.stop_error
    return plan.report(asked.jobs, runners, asked.notes)


def _in_threads(asked: Request, gate: JobGates) -> Sequence[JobRunner]:
    """Run each job in a thread of this process, to its end."""
    jobs, device = asked.jobs, asked.device
    generators = default_generators(device)
    with ExitStack() as stack:
        stack.enter_context(_only_call())
        randoms = [JobRandom(device, generators, job.seed) for job in jobs]
        by_name = {job.name: own for job, own in zip(jobs, randoms, strict=True)}
        common = SharedState(device, generators, by_name)
        stack.callback(common.restore_generators)
        shared = SharedSettings(gate, asked.mode, asked.num_iterations, common)
        in_turns = asked.mode is Mode.TURNS
        # In turns all are on one lane: each job reuses memory that the others freed.
        lanes = [
            open_device(device, 1, timeout_s=job.timeout_s)
            for job in (jobs[:1] if in_turns else jobs)
        ]
        for lane in lanes:
            stack.callback(lane.close)
        lanes *= len(jobs) if in_turns else 1
        runners = [
            JobRunner(*parts)
            for parts in zip(jobs, [shared] * len(jobs), lanes, randoms, strict=True)
        ]
        for runner in runners:
            runner.own_threads.on_refused = partial(gate.end_soon, runner.name)
            stack.callback(runner.own_threads.close)
        stack.enter_context(starts_seen())
        stack.enter_context(blocks_checked())
        stack.enter_context(generators_by_thread(device))

        @contextmanager
        def own_random() -> Iterator[None]:
            common.restore_generators()
            guard = default_generator_by_thread()
            with nullcontext() if in_turns else guard:
                yield

        with _ended(runners, common):
            _run(jobs, runners, gate, own_random())
    return runners


@contextmanager
def _only_call() -> Iterator[None]:
    """Refuse another call meanwhile.

    Raises:
        ConfigError: there is one.
    """
    if not _ACTIVE.acquire(blocking=False):
        raise ConfigError(
            "another hocket.share runs jobs in threads of this process, whose settings "
            "and random numbers are one: give all jobs to one call, or use "
            "processes=True"
        )
    try:
        yield
    finally:
        _ACTIVE.release()


@contextmanager
def _ended(runners: Sequence[JobRunner], common: SharedState) -> Iterator[None]:
    """Let no job go on behind the block, also after a KeyboardInterrupt."""
    try:
        yield
    except BaseException:
        common.close()
        for runner in runners:
            runner.abandon()
            if runner.thread.ident is not None:
                runner.thread.join(LOOK_S)
        raise
    finally:
        common.close()
        for runner in runners:  # a thread may have outlived its job
            runner.error = runner.error or runner.own_threads.error
            runner.random.close()


def _in_processes(asked: Request, gate: JobGates) -> Sequence[JobProcess]:
    """Run each job in a process of its own, to its end; none of them is left behind."""
    if env.SHARED_JOB.is_set:
        raise ConfigError(
            "hocket.share(processes=True) was called inside a job's process: a script "
            'that calls it needs the guard `if __name__ == "__main__":` around the call'
        )
    sent = [
        sent_job(job, asked.mode, asked.num_iterations, asked.device)
        for job in asked.jobs
    ]
    with ExitStack() as stack:
        runners = []
        for job in sent:
            runners.append(JobProcess(job, gate))
            stack.push(runners[-1].close_after)
        for runner in runners:
            runner.wait_until_started()
        _run(asked.jobs, runners, gate, nullcontext())
    return runners


def _run(
    jobs: Sequence[Job],
    runners: Sequence[JobRunner | JobProcess],
    gate: JobGates,
    around: AbstractContextManager[None],
) -> None:
    """Make all jobs, one after the other; then let them run to their ends.

    Args:
        jobs: the jobs.
        runners: one for each.
        gate: their gates.
        around: what holds while they run.
    """
    by_name = {runner.name: runner for runner in runners}
    gate.on_abandon = lambda name: by_name[name].abandon()
    for job in jobs:
        gate.join(job.name, job.weight, job.max_slowdown, job.timeout_s)
    try:
        for runner in runners:
            _make(runner, gate)
        with around:
            gate.begin()
            gate.all_made.set()
            gate.wait_for_end()
    except BaseException as error:
        gate.stop(error)
        raise
    for runner in runners:
        runner.join(is_hung=runner.name in gate.hung)


def _make(runner: JobRunner | JobProcess, gate: JobGates) -> None:
    """Start a job's thread, and wait until the job is made or hangs."""
    gate.begin()
    runner.thread.start()
    while not runner.made.wait(LOOK_S):
        with gate.lock:
            gate.abandon_hung(only=runner.name)
            if runner.name in gate.hung:
                return


#     job a   autocast: cast w ──────── use w ── cast w again ── use w
#     job b       autocast ─── leaves: the cache is empty
#
# torch has one cache of casts for all threads, and empties it when one of them leaves
# its last block. A weight that is used twice is then cast twice, and its gradient is
# added up in another order than alone.
def _enter_without_cache(enter: Callable[..., Any]) -> Callable[..., Any]:
    def enter_without_cache(block: Any) -> Any:
        found = enter(block)
        job, draws = shared_job(), THREAD.draws
        if job is None or draws is None or not torch.is_autocast_cache_enabled():
            return found
        if not torch.is_autocast_enabled(block.device):
            return found
        block.__exit__(None, None, None)
        error = ConfigError(
            f"{draws.subject.format(job)} entered torch.autocast with its cache of "
            "weights, which is one for all threads: where other jobs empty it, "
            "gradients differ from those alone; give autocast cache_enabled=False, or "
            f"use {draws.ways_out}"
        )
        draws.refused(error)
        raise error

    return enter_without_cache


def blocks_checked() -> AbstractContextManager[None]:
    """Replace `torch.autocast.__enter__` in the block, to see which job calls it."""
    return replaced(torch.autocast, "__enter__", by=_enter_without_cache)


# What `hocket.share` was asked for, checked before anything starts.
@dataclass(frozen=True, slots=True)
class Request:
    """The checked arguments of `share`, with defaults filled in.

    Args:
        jobs: the jobs.
        budget_bytes: the most that all of them may hold; inf for no limit.
        mode: the mode; turns instead of auto where the allocator requires it.
        num_iterations: see `share`.
        device: the device.
        notes: lines for the report.
    """

    jobs: Sequence[Job]
    budget_bytes: float
    mode: Mode
    num_iterations: int | None
    device: torch.device
    notes: Sequence[str]


def read_request(
    jobs: Iterable[Job],
    *,
    memory_bytes: int | None = None,
    mode: str = "auto",
    num_iterations: int | None = None,
    device: str | torch.device | None = None,
    processes: bool = False,
) -> Request:
    """Check the arguments of `share`; starts nothing, and writes nothing.

    Raises:
        ConfigError: see `share`.
    """
    found = _listed(jobs)
    check_jobs(found)
    wanted, notes = _mode_of(mode), list[str]()
    refuse_without_effect(found, wanted)
    _check_numbers(memory_bytes, num_iterations)
    torch_device = _device_of(device)
    is_gpu = torch_device.type == "cuda"
    if is_gpu and processes:
        notes.append(process_note(Path(env.MPS_PIPE.text())))
    elif is_gpu:
        wanted = allowed_mode(wanted, cuda.allocator_backend(), notes)
    return Request(
        found,
        inf if memory_bytes is None else memory_bytes,
        wanted,
        num_iterations,
        torch_device,
        notes,
    )


def _listed(jobs: Iterable[Job]) -> list[Job]:
    if not isinstance(jobs, Iterable):
        raise ConfigError(
            f"jobs is a {type(jobs).__name__} and no list of jobs: give "
            "hocket.share([hocket.Job(...), ...])"
        )
    found = list(jobs)
    for i, job in enumerate(found):
        if not isinstance(job, Job):
            raise ConfigError(
                f"jobs[{i}] is a {type(job).__name__} and no job: give "
                "hocket.Job(name, make), where make returns a step and its batches"
            )
    return found


def _check_numbers(memory_bytes: object, num_iterations: object) -> None:
    if memory_bytes is not None and not _is_above_0(memory_bytes, int | float):
        raise ConfigError(
            f"memory_bytes={memory_bytes!r} is no number of bytes above 0: give one, "
            "such as 20 * 2**30 for 20 GiB, or None for no limit"
        )
    if num_iterations is not None and not _is_above_0(num_iterations, int):
        raise ConfigError(
            f"num_iterations is {num_iterations!r}: give a whole number, at least 1, "
            "or None for all batches"
        )


def _is_above_0(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and value > 0


def _mode_of(name: str) -> Mode:
    names = [mode.value for mode in Mode]
    if name not in names:
        raise ConfigError(f"mode {name!r} is unknown: {nearest(str(name), names)}")
    return Mode(name)


def _device_of(device: str | torch.device | None) -> torch.device:
    """Return the device, with its number.

    Raises:
        ConfigError: there is none of this name.
    """
    num_gpus = cuda.num_devices() if cuda.is_available() else 0
    if device is None:
        return torch.device("cuda", 0) if num_gpus else torch.device("cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise _no_device(device, num_gpus) from None
    if found.type == "cpu":
        return torch.device("cpu")
    number = found.index or 0
    if found.type != "cuda" or number >= num_gpus:
        raise _no_device(device, num_gpus)
    return torch.device("cuda", number)


def _no_device(device: object, num_gpus: int) -> ConfigError:
    return ConfigError(
        f"device {str(device)!r}: jobs share a GPU (cuda, cuda:1) or the CPU (cpu), "
        f"and torch sees {num_gpus} GPUs here; without device= it is the first GPU, "
        "or else the CPU"
    )


def refuse_without_effect(jobs: Sequence[Job], wanted: Mode) -> None:
    """Refuse weights and slowdown limits that the mode ignores.

    Raises:
        ConfigError: says in which modes they have an effect.
    """
    weights = [job.weight for job in jobs]
    if wanted not in WITH_SHARES and len(set(weights)) > 1:
        raise ConfigError(
            f'mode="{wanted.value}" gives the jobs no shares: in lag and tick-tock all '
            "start equally often, and in free no job waits. The weights "
            f"{', '.join(f'{x:g}' for x in weights)} have no effect: use "
            'mode="budget", "turns" or "auto", or give all jobs one weight'
        )
    for job in jobs:
        if wanted not in WITH_SLOWDOWNS and job.max_slowdown < inf:
            raise ConfigError(
                f"job {job.name!r}: max_slowdown={job.max_slowdown:g} has no effect in "
                f'mode="{wanted.value}", which does not look at it: use '
                'mode="budget", "lag", "turns" or "auto", or leave it out'
            )


def allowed_mode(wanted: Mode, backend: str, notes: list[str]) -> Mode:
    """Return the mode that CUDA's allocator allows.

    The native allocator gives memory that a stream has freed to that stream only.

    Args:
        wanted: the mode that was asked for.
        backend: the allocator: native or cudaMallocAsync.
        notes: this function may append a line for the report.

    Raises:
        ConfigError: the mode shares memory, and the allocator does not.
    """
    if backend != cuda.NATIVE_ALLOCATOR or wanted is Mode.TURNS:
        return wanted
    advice = (
        "torch's native allocator keeps freed memory for the stream that freed it, so "
        "jobs on two streams reserve both peaks whatever their order: set "
        f"{env.CUDA_ALLOCATOR.name}=backend:cudaMallocAsync before torch is imported "
        "(`hocket share` does)"
    )
    if wanted in {Mode.LAG, Mode.BUDGET}:
        raise ConfigError(f'mode="{wanted.value}": {advice}, or use mode="turns"')
    notes.append(f"note: {advice}")
    return Mode.TURNS if wanted is Mode.AUTO else wanted


def process_note(mps_pipe: Path) -> str:
    """Return what the report says about processes that share a GPU.

    Args:
        mps_pipe: the folder in which the control daemon of MPS listens.
    """
    if (mps_pipe / "control").exists():
        return (
            f"note: processes share the GPU through MPS ({mps_pipe}): kernels of "
            "several run at the same time, and a fatal fault of one ends all"
        )
    return (
        "note: processes share the GPU in slices of time, and their kernels do not "
        "overlap: a running MPS daemon (nvidia-cuda-mps-control -d) lets them"
    )
