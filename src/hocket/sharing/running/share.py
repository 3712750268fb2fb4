"""`hocket.share`: several jobs train on one device at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from math import inf
from pathlib import Path

import torch

from hocket import cuda, env
from hocket.errors import ConfigError
from hocket.nearest import nearest
from hocket.run.device.open import open_device
from hocket.sharing.policy import WITH_SHARES, WITH_SLOWDOWNS, Mode
from hocket.sharing.report import ShareReport
from hocket.sharing.running import autocast_cache, job_threads
from hocket.sharing.running.gate import LOOK_S, JobGates
from hocket.sharing.running.job import Job, check_jobs
from hocket.sharing.running.plan import SharePlan
from hocket.sharing.running.processes.job_process import JobProcess
from hocket.sharing.running.processes.sent_job import sent_job
from hocket.sharing.running.random_state import (
    JobRandom,
    default_generator_by_thread,
    default_generators,
    generators_by_thread,
)
from hocket.sharing.running.runner import JobRunner, Shared
from hocket.sharing.running.shared_state import SharedState


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
        ConfigError: jobs, mode or the allocator cannot be used so; or the mode does not
            look at what a job asks for.
        FitError: the memory is less than turns need; names what is needed.
        WaitError: a job's process does not start.
    """
    jobs = list(jobs)
    check_jobs(jobs)
    wanted, notes = _mode_of(mode), list[str]()
    refuse_without_effect(jobs, wanted)
    if num_iterations is not None and num_iterations < 1:
        raise ConfigError(f"num_iterations is {num_iterations}: at least 1")
    torch_device = _device_of(device)
    is_gpu = torch_device.type == "cuda"
    if is_gpu and processes:
        notes.append(process_note(Path(env.MPS_PIPE.text())))
    elif is_gpu:
        wanted = allowed_mode(wanted, cuda.allocator_backend(), notes)
    budget_bytes = inf if memory_bytes is None else memory_bytes
    plan = SharePlan(wanted, budget_bytes, are_apart=is_gpu and processes)
    gate = JobGates(
        plan.board, on_finish=plan.after_iteration, keeps_memory=not processes
    )
    plan.gate = gate
    run = _in_processes if processes else _in_threads
    runners = run(jobs, gate, wanted, num_iterations, torch_device)
    if gate.stop_error is not None:
        raise gate.stop_error
    return plan.report(jobs, runners, notes)


def _in_threads(
    jobs: Sequence[Job],
    gate: JobGates,
    wanted: Mode,
    num_iterations: int | None,
    device: torch.device,
) -> Sequence[JobRunner]:
    """Run each job in a thread of this process, to its end."""
    generators = default_generators(device)
    with ExitStack() as stack:
        states = [x.get_state() for x in generators]
        randoms = [JobRandom(device, generators, job.seed) for job in jobs]
        by_name = {job.name: own for job, own in zip(jobs, randoms, strict=True)}
        common = SharedState(device, generators, by_name)
        shared = Shared(gate, wanted, num_iterations, common)
        in_turns = wanted is Mode.TURNS
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
        stack.enter_context(job_threads.STARTS)
        stack.enter_context(autocast_cache.BLOCKS)
        stack.enter_context(generators_by_thread(device))

        @contextmanager
        def own_random() -> Iterator[None]:
            common.restore_generators()
            guard = default_generator_by_thread()
            with nullcontext() if in_turns else guard:
                yield

        try:
            _run(jobs, runners, gate, own_random())
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
    return runners


def _in_processes(
    jobs: Sequence[Job],
    gate: JobGates,
    wanted: Mode,
    num_iterations: int | None,
    device: torch.device,
) -> Sequence[JobProcess]:
    """Run each job in a process of its own, to its end; none of them is left behind."""
    if env.SHARED_JOB.is_set:
        raise ConfigError(
            "hocket.share(processes=True) was called inside a job's process: a script "
            'that calls it needs the guard `if __name__ == "__main__":` around the call'
        )
    sent = [sent_job(job, wanted, num_iterations, device) for job in jobs]
    with ExitStack() as stack:
        runners = []
        for job in sent:
            runners.append(JobProcess(job, gate))
            stack.push(runners[-1].close_after)
        for runner in runners:
            runner.wait_until_started()
        _run(jobs, runners, gate, nullcontext())
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


def _mode_of(name: str) -> Mode:
    names = [mode.value for mode in Mode]
    if name not in names:
        raise ConfigError(f"mode {name!r} is unknown: {nearest(name, names)}")
    return Mode(name)


def _device_of(device: str | torch.device | None) -> torch.device:
    if device is not None:
        found = torch.device(device)
        is_bare = found.type == "cuda" and found.index is None
        return torch.device("cuda", 0) if is_bare else found
    return torch.device("cuda", 0) if cuda.is_available() else torch.device("cpu")


def refuse_without_effect(jobs: Sequence[Job], wanted: Mode) -> None:
    """Refuse weights and limits that a mode does not look at.

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

    The native allocator keeps the memory that one stream freed from all others.

    Args:
        wanted: the mode that was asked for.
        backend: the allocator: native or cudaMallocAsync.
        notes: gets what the report should say.

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
