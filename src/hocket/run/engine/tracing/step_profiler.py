"""Runs torch's profiler over chosen steps, and writes a trace with this worker's ops.

    steps       2 │ 3        │ 4        │ 5
    profiler      ├ marks ── ops ─ marks ┤ steps-3-4-rank-0.json

It only watches: its first error is logged, and nothing is traced any more.
`Pipeline.train` raises it at the end of the loader; `Pipeline.step` only logs it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hocket import cuda
from hocket.run.engine.lanes.op_times import OpTimes
from hocket.run.engine.lanes.play_plan import PlayPlan, Portion
from hocket.run.engine.tracing.chrome_trace import MARK, TracedOp, add_ops
from hocket.run.engine.tracing.profile_steps import ProfileSteps

log = logging.getLogger(__name__)

_NUM_MARKS: Final = 8  # at the begin, and again at the end


@dataclass(frozen=True, slots=True)
class _Played:
    """A portion that was played; its record is corrected where reductions go on.

    Args: see `StepProfiler.add`.
    """

    plan: PlayPlan
    portion: Portion
    device: int
    steps: Mapping[int, int]
    first: int
    record: OpTimes

    def ops(self) -> Iterator[TracedOp]:
        """Yield the ops, lane by lane."""
        part, record = self.plan.portions[self.portion], self.record
        numbers = self.plan.schedule.lanes_of(self.device)
        for i, number in enumerate(numbers):
            lane = self.plan.schedule.lanes[number]
            times = zip(
                part.lanes[number],
                record.start_s[i].tolist(),
                record.end_s[i].tolist(),
                strict=True,
            )
            for planned, start_s, end_s in times:
                place = self.first + planned.op.step - part.shift
                if end_s > 0.0:  # a batch that ends no step leaves some out
                    op = replace(planned.op, step=self.steps.get(place, place))
                    yield TracedOp(op, lane.label, lane.stream, start_s, end_s)


class StepProfiler:
    """Traces the chosen steps of one worker.

    Args:
        settings: which steps.
        rank: this worker's rank, for the names of files.
        device: where it computes.

    Raises:
        ConfigError: the device keeps no history of its memory.
    """

    def __init__(self, settings: ProfileSteps, rank: int, device: torch.device) -> None:
        settings.check_device(device)
        self._errors: list[Exception] = []
        self._is_off = False
        self._settings = settings
        self._folder = Path(settings.folder).absolute()
        self._chosen = frozenset(settings.steps)
        self._rank, self._device = rank, device
        self._profile: profile | None = None
        self._marks: dict[str, tuple[float, float]] = {}
        self._played: list[_Played] = []
        self._steps: set[int] = set()  # chosen ones of this trace

    def before(self, steps: Iterable[int]) -> None:
        """Begin a trace, or end it, before a portion in which these steps are open."""
        due = self._chosen.intersection(steps)
        self._steps |= due
        if due and self._profile is None and not self._is_off:
            with self._kept():
                self._start()
        elif not due:
            self.close()

    def add(
        self,
        plan: PlayPlan,
        portion: Portion,
        device: int,
        steps: Mapping[int, int],
        first: int,
        record: OpTimes,
    ) -> None:
        """Note when the ops of a portion were done; see `Executor.play`.

        Args:
            plan: what is played.
            portion: the portion.
            device: this worker's device in the plan.
            steps: the step's number of each place.
            first: the place that the portion's step 0 is.
            record: when this device's ops were done.
        """
        if self._profile is not None:
            played = _Played(plan, portion, device, dict(steps), first, record)
            self._played.append(played)

    def after(self, still_open: Iterable[int]) -> None:
        """End the trace after a portion, if no step that is due comes next.

        Args:
            still_open: the steps under way that have not ended.
        """
        due_next = max(self._steps, default=-1) + 1 in self._chosen
        if not due_next and self._chosen.isdisjoint(still_open):
            self.close()

    def close(self) -> None:
        """End the trace, if there is one, and write it."""
        if self._profile is None:
            return
        with self._kept():
            try:
                self._write(self._profile)
            finally:
                self._end_memory_history()
        self._profile = None
        self._played, self._marks, self._steps = [], {}, set()

    def take_errors(self) -> list[Exception]:
        """Return what failed since the last call."""
        errors, self._errors = self._errors, []
        return errors

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._errors.append(error)
            self._is_off = True
            log.exception("the trace of chosen steps failed; training goes on")

    def _end_memory_history(self) -> None:
        if self._settings.memory:
            cuda.stop_memory_history()

    def _start(self) -> None:
        kinds = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        started = profile(activities=kinds, experimental_config=options)
        try:
            if self._settings.memory:
                cuda.record_memory_history()
            started.start()
        except BaseException:
            self._end_memory_history()
            raise
        self._profile = started
        self._mark()

    def _mark(self) -> None:
        for _ in range(_NUM_MARKS):
            name = f"{MARK}{len(self._marks)}"
            before_s = perf_counter()
            with record_function(name):
                pass
            self._marks[name] = before_s, perf_counter()

    def _write(self, profiled: profile) -> None:
        """Write the trace, with the ops, and the memory's history; no unfinished file.

        Raises:
            OSError: a file cannot be written.
        """
        self._mark()
        profiled.stop()
        first, last = min(self._steps), max(self._steps)
        folder = self._folder
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"steps-{first}-{last}-rank-{self._rank}"
        if self._settings.memory:
            cuda.write_memory_history(folder / f"{stem}.memory.pickle")
        unfinished = folder / f"{stem}.partial"
        try:
            profiled.export_chrome_trace(str(unfinished))
            trace = json.loads(unfinished.read_text(encoding="utf-8"))
            ops = [op for played in self._played for op in played.ops()]
            trace["traceName"] = str(folder / f"{stem}.json")
            add_ops(trace, ops, self._marks, os.getpid())
            unfinished.write_text(json.dumps(trace), encoding="utf-8")
            unfinished.replace(folder / f"{stem}.json")
        finally:
            unfinished.unlink(missing_ok=True)
