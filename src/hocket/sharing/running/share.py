"""`hocket.share`: several jobs train on one device at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import inf
from statistics import median
from typing import Final

import torch

from hocket import cuda, env
from hocket.draw.quantity import byte_size
from hocket.errors import ConfigError, FitError
from hocket.nearest import nearest
from hocket.run.device.open import open_device
from hocket.sharing.board import Board, Iteration, JobRecord
from hocket.sharing.choose import Choice, choose, slowdowns
from hocket.sharing.policy import Mode
from hocket.sharing.report import JobReport, ShareReport
from hocket.sharing.running.gate import LOOK_S, JobGates
from hocket.sharing.running.job import Job, check_jobs
from hocket.sharing.running.random_state import (
    JobRandom,
    UnguardedDrawCheck,
    default_generators,
    generators_by_thread,
)
from hocket.sharing.running.runner import NUM_WATCHED, JobRunner, Shared
from hocket.sharing.running.settings import read_settings
from hocket.sharing.simulate import SimulatedJob

_NUM_ALONE: Final = NUM_WATCHED + 2  # iterations of each job in turns, at first
_NUM_TRIAL: Final = 6  # iterations of each job side by side, in auto
_NATIVE: Final = "native"


def share(
    jobs: Iterable[Job],
    *,
    memory_bytes: int | None = None,
    mode: str = "auto",
    num_iterations: int | None = None,
    device: str | torch.device | None = None,
) -> ShareReport:
    """Train several jobs on one device, each exactly as it would alone.

    Every job has a thread, a lane of the device and a random state of its own. Its
    first iterations run in turns, and show how long they take and what they hold.

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

    Returns:
        What happened. `report.check()` raises an error if a job has failed.

    Raises:
        ConfigError: jobs, mode or the allocator cannot be used so.
        FitError: the memory is less than turns need; names what is needed.
    """
    jobs = list(jobs)
    check_jobs(jobs)
    wanted, notes = _mode_of(mode), list[str]()
    torch_device = _device_of(device)
    if torch_device.type == "cuda":
        wanted = allowed_mode(wanted, cuda.allocator_backend(), notes)
    plan = _Plan(wanted, inf if memory_bytes is None else memory_bytes)
    gate = JobGates(plan.board, on_finish=plan.after_iteration)
    plan.gate = gate
    generators = default_generators(torch_device)
    with ExitStack() as stack:
        states = [x.get_state() for x in generators]
        unguarded = UnguardedDrawCheck(torch_device, generators)
        shared = Shared(gate, wanted, read_settings(), unguarded, num_iterations)
        randoms = [JobRandom(torch_device, generators, job.seed) for job in jobs]
        in_turns = wanted is Mode.TURNS
        # In turns all are on one lane: each job reuses memory that the others freed.
        lanes = [
            open_device(torch_device, 1, timeout_s=job.timeout_s)
            for job in (jobs[:1] if in_turns else jobs)
        ]
        for lane in lanes:
            stack.callback(lane.close)
        lanes *= len(jobs) if in_turns else 1
        runners = [
            JobRunner(*parts)
            for parts in zip(jobs, [shared] * len(jobs), lanes, randoms, strict=True)
        ]
        by_name = {runner.name: runner for runner in runners}
        gate.on_abandon = lambda name: by_name[name].abandon()
        for job in jobs:
            gate.join(job.name, job.weight, job.max_slowdown, job.timeout_s)
        try:
            _run(runners, gate, unguarded, is_turns=in_turns)
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
    if gate.stop_error is not None:
        raise gate.stop_error
    return plan.report(jobs, runners, notes)


def _run(
    runners: Sequence[JobRunner],
    gate: JobGates,
    unguarded: UnguardedDrawCheck,
    *,
    is_turns: bool,
) -> None:
    """Make all jobs, one after the other; then let them run to their ends."""
    try:
        for runner in runners:
            _make(runner, gate)
        unguarded.restore()
        by_thread = {runner.thread.ident or 0: runner.random for runner in runners}
        guard = generators_by_thread(runners[0].device, by_thread)
        with nullcontext() if is_turns else guard:
            gate.begin()
            for runner in runners:
                runner.go()
            gate.wait_for_end()
    except BaseException as error:
        gate.stop(error)
        for runner in runners:  # those that are made end at their gates
            runner.go()
        raise
    for runner in runners:
        if runner.name not in gate.hung:
            runner.thread.join()


def _make(runner: JobRunner, gate: JobGates) -> None:
    """Start a job's thread, and wait until the job is made or hangs."""
    gate.begin()
    runner.thread.start()
    while not runner.made.wait(LOOK_S):
        with gate.condition:
            gate.abandon_hung(only=runner.name)
            if runner.name in gate.hung:
                return


@dataclass(slots=True)
class _Plan:
    """Switches the mode: turns first, in `auto` then a trial, then the final mode.

    Args:
        wanted: the mode that was asked for.
        budget_bytes: the most that all jobs may hold.
    """

    wanted: Mode
    budget_bytes: float
    board: Board = field(init=False)
    gate: JobGates | None = None
    choice: Choice | None = None
    first_shared: dict[str, int] = field(default_factory=dict)
    first_trial: dict[str, int] | None = None
    is_choosing: bool = False

    def __post_init__(self) -> None:
        """Begin in turns."""
        self.board = Board(Mode.TURNS, self.budget_bytes)

    def after_iteration(self) -> Callable[[], None] | None:
        """Change the mode, when all jobs have run long enough in the one before.

        Returns:
            What takes long, in `auto`: to choose the mode, when the trial is over.
        """
        records = self.board.records
        if self.first_shared or self.is_choosing:
            return None
        if self.first_trial is None:
            if not self._have_run(_NUM_ALONE, {}):
                return None
            self._check_fits(records)
            self.first_trial = _counts(records)
            is_auto = self.wanted is Mode.AUTO
            self.board.switch(Mode.BUDGET if is_auto else self.wanted)
            if not is_auto:
                self.first_shared = self.first_trial
        elif self._have_run(_NUM_TRIAL, self.first_trial):
            self.is_choosing = True
            return partial(self._choose, self._measured(records))
        return None

    def _choose(self, measured: Sequence[SimulatedJob]) -> None:
        assert self.gate is not None
        self.choice = choose(measured, self.budget_bytes)
        with self.gate.condition:
            self.board.switch(self.choice.mode)
            self.first_shared = _counts(self.board.records)
            self.gate.condition.notify_all()

    def _have_run(self, number: int, since: dict[str, int]) -> bool:
        return all(
            len(record.iterations) - since.get(name, 0) >= number
            for name, record in self.board.records.items()
        )

    def _check_fits(self, records: dict[str, JobRecord]) -> None:
        states = [x.state for x in records.values()]
        peak = max(x.forecast.curve.peak if x.forecast else 0.0 for x in states)
        static = sum(x.static_bytes for x in states)
        needed = int(static + peak) + 1
        if needed > self.budget_bytes and self.gate is not None:
            self.gate.stop(
                FitError(
                    f"memory_bytes={int(self.budget_bytes):,} is less than these jobs "
                    f"need in turns: {byte_size(static)} that stay, and "
                    f"{byte_size(peak)} of the largest iteration; give at least "
                    f"memory_bytes={needed:,}",
                    device=0,
                    needed_bytes=needed,
                    memory_bytes=int(self.budget_bytes),
                )
            )

    def _measured(self, records: dict[str, JobRecord]) -> list[SimulatedJob]:
        """Return each job as the trial has shown it."""
        assert self.first_trial is not None
        trial = {
            name: record.iterations[self.first_trial.get(name, 0) :]
            for name, record in records.items()
        }
        factors = slowdowns(trial, {name: x.solo_s for name, x in records.items()})
        found = []
        for name, record in records.items():
            forecast = record.state.forecast
            assert forecast is not None
            alone = forecast.seconds or 1.0
            scale = record.solo_s / alone
            found.append(
                SimulatedJob(
                    name,
                    forecast.retimed(
                        forecast.forward_s * scale, forecast.backward_s * scale
                    ),
                    1,
                    weight=record.state.weight,
                    max_slowdown=record.max_slowdown,
                    static_bytes=record.state.static_bytes,
                    away_s=_away_s(trial[name]),
                    slowdown=factors[name],
                )
            )
        return found

    def report(
        self, jobs: Sequence[Job], runners: Sequence[JobRunner], notes: Sequence[str]
    ) -> ShareReport:
        """Return the report."""
        assert self.gate is not None
        reports = []
        lists = [record.iterations for record in self.gate.ended.values()]
        until_s = min((own[-1].end_s for own in lists if own), default=0.0)
        for job, runner in zip(jobs, runners, strict=True):
            record = self.gate.ended[job.name]
            reports.append(
                JobReport(
                    job.name,
                    job.weight,
                    runner.loss_values(),
                    tuple(record.iterations),
                    self.first_shared.get(job.name, 0),
                    until_s,
                    record.solo_s,
                    record.state.static_bytes,
                    record.state.forecast,
                    record.num_wrong,
                    runner.error,
                    job.name in self.gate.hung,
                )
            )
        choice = self.choice or Choice(self.wanted, "as asked for", ())
        if choice.mode is Mode.AUTO:
            choice = Choice(Mode.TURNS, "the jobs ended before the trial did", ())
        return ShareReport(
            choice.mode,
            choice.why,
            tuple(reports),
            self.budget_bytes,
            choice.predictions,
            tuple(notes),
        )


def _counts(records: dict[str, JobRecord]) -> dict[str, int]:
    return {name: len(record.iterations) for name, record in records.items()}


def _away_s(iterations: Sequence[Iteration]) -> float:
    """Return how long a job loads data between two iterations."""
    pairs = pairwise(iterations)
    return median([b.request_s - a.end_s for a, b in pairs] or [0.0])


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
    if backend != _NATIVE or wanted is Mode.TURNS:
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
