"""Which mode comes next while jobs share a device, and what they have done in the end.

turns ──▶ the mode that was asked for
──▶ side by side (a trial) ──▶ the mode that is chosen       in `auto`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Final

from hocket.draw.quantity import byte_size
from hocket.errors import FitError
from hocket.sharing.board import MEMORY_MARGIN, Board, Iteration, JobRecord
from hocket.sharing.policy import Mode
from hocket.sharing.report import JobReport, ShareReport
from hocket.sharing.running.gate import JobGates
from hocket.sharing.running.job import Job
from hocket.sharing.running.processes.job_process import JobProcess
from hocket.sharing.running.runner import NUM_WATCHED, JobRunner
from hocket.sharing.simulate import Choice, SimulatedJob, choose, slowdowns

# Eight after warm-up, for a mean also where every second or fourth one is long.
_NUM_ALONE: Final = NUM_WATCHED + 8  # iterations in turns, at first
_NUM_TRIAL: Final = 8  # iterations side by side, in auto
# Small allocations, such as random states, differ between runs by less than this.
_VARIES_BYTES: Final = 1 << 16
_NOTED_BYTES: Final = 1 << 20  # less growth is not reported


@dataclass(slots=True)
class SharePlan:
    """Switches the mode: turns first, in `auto` then a trial, then the final mode.

    Args:
        wanted: the mode that was asked for.
        budget_bytes: the most that all jobs may hold.
        are_apart: whether a job cannot reuse memory that another one freed: processes
            on a GPU each keep the memory of their peak.
        keeps_memory: whether what a hung job holds is lost.
    """

    wanted: Mode
    budget_bytes: float
    are_apart: bool = False
    keeps_memory: bool = True
    board: Board = field(init=False)
    gate: JobGates = field(init=False)
    choice: Choice | None = None
    first_shared: dict[str, int] = field(default_factory=dict)
    first_trial: dict[str, int] | None = None
    is_choosing: bool = False
    has_checked: bool = False

    def __post_init__(self) -> None:
        """Begin in turns."""
        self.board = Board(Mode.TURNS, self.budget_bytes)
        self.gate = JobGates(
            self.board, on_finish=self.after_iteration, keeps_memory=self.keeps_memory
        )

    def after_iteration(self) -> Callable[[], None] | None:
        """Change the mode, when all jobs have run long enough in the one before.

        Returns:
            A slow call for the caller to make without the lock: it chooses the mode.
        """
        records = self.board.records
        if not self.has_checked:
            self._check_first(records)
        if self.first_shared or self.is_choosing:
            return None
        if self.first_trial is None:
            if not self._have_run(_NUM_ALONE, {}):
                return None
            self._check_fits(records.values())
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
        self.choice = choose(measured, self.budget_bytes)
        with self.gate.lock:
            self.board.switch(self.choice.mode)
            self.first_shared = _counts(self.board.records)
            self.gate.wake_all()

    def _have_run(self, number: int, since: dict[str, int]) -> bool:
        return all(
            len(record.iterations) - since.get(name, 0) >= number
            for name, record in self.board.records.items()
        )

    def _check_first(self, records: dict[str, JobRecord]) -> None:
        """Compare the budget with what turns need, once every job has a forecast.

        Jobs that have ended meanwhile count with what they held.
        """
        if all(x.state.forecast is not None for x in records.values()):
            self.has_checked = True
            self._check_fits([*self.gate.ended.values(), *records.values()])

    def _check_fits(self, records: Iterable[JobRecord]) -> None:
        states = [x.state for x in records]
        peaks = [x.forecast.curve.peak if x.forecast else 0.0 for x in states]
        peak = sum(peaks) if self.are_apart else max(peaks)
        static = sum(x.static_bytes for x in states)
        needed = int(static + peak) + 1
        which = "the largest iteration"
        if self.are_apart:
            which = "the iterations of all processes"
        if needed > self.budget_bytes:
            enough = needed + _VARIES_BYTES
            self.gate.stop(
                FitError(
                    f"memory_bytes={int(self.budget_bytes):,} is less than these jobs "
                    f"need in turns: {byte_size(static)} that stay, and "
                    f"{byte_size(peak)} of {which}; give at least "
                    f"memory_bytes={enough:,}",
                    device=0,
                    needed_bytes=enough,
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
        factors = slowdowns(trial, {name: x.alone_s for name, x in records.items()})
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
        self,
        jobs: Sequence[Job],
        runners: Sequence[JobRunner | JobProcess],
        notes: Sequence[str],
    ) -> ShareReport:
        """Return the report."""
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
                    record.alone_s,
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
            (*notes, *_growth_notes(self.gate.ended)),
        )


def _growth_notes(records: dict[str, JobRecord]) -> Iterator[str]:
    """Say of each job that grew by how much, and what limits it."""
    for name, record in records.items():
        growth = record.growth
        if growth is None or growth.static_bytes < MEMORY_MARGIN * growth.first_bytes:
            continue
        more = growth.static_bytes - growth.first_bytes
        if more >= _NOTED_BYTES:
            yield (
                f"note: job {name!r} came to hold {byte_size(more)} more between "
                f"iterations than the {byte_size(growth.first_bytes)} at first: it "
                "keeps tensors from iteration to iteration; its memory_bytes= limits it"
            )


def _counts(records: dict[str, JobRecord]) -> dict[str, int]:
    return {name: len(record.iterations) for name, record in records.items()}


def _away_s(iterations: Sequence[Iteration]) -> float:
    """Return how long a job loads data between two iterations."""
    pairs = pairwise(iterations)
    return median([b.request_s - a.end_s for a, b in pairs] or [0.0])
