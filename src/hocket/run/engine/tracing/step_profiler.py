"""Runs torch's profiler over chosen steps, and writes a trace with this worker's ops.

    steps       2 │ 3        │ 4        │ 5
    profiler      ├ marks ── ops ─ marks ┤ steps-3-4-rank-0.json

It only watches: its first error is logged, and nothing is traced any more.
`Pipeline.train` raises it at the end of the loader; `Pipeline.step` only logs it.

Adds the ops of lanes to a trace of torch's, on torch's clock.

    host's clock     before_s ├────────────┤ after_s      perf_counter
    torch's clock         ts ├──────────┤ ts + dur        microseconds

Torch's profiler has a clock of its own. A few marks are recorded with the host's time
before and after; the one with the least between them gives the offset, to within half
of what is between.

Source: "Trace Event Format", the JSON that Perfetto and chrome://tracing read.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hocket import cuda
from hocket.core.op import ASYNCHRONOUS, Op
from hocket.draw.palette import KIND_NAMES
from hocket.run.engine.lanes.op_times import OpTimes
from hocket.run.engine.lanes.play_plan import PlayPlan, Portion
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


MARK: Final = "hocket: mark "  # and its number
_FIRST_TRACK: Final = 1 << 24  # above any thread's number, which the others have

_Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TracedOp:
    """When an op was done.

    Args:
        op: the op, with the step's number in the run.
        lane: the lane's label.
        stream: the lane's number on its device.
        start_s: when it began, in seconds of `perf_counter`.
        end_s: when it ended.
    """

    op: Op
    lane: str
    stream: int
    start_s: float
    end_s: float


def add_ops(
    trace: dict[str, Any],
    ops: Sequence[TracedOp],
    marks: Mapping[str, tuple[float, float]],
    process: int,
) -> None:
    """Add a track for each lane to a trace, above those of torch.

    The entry `hocket` says by how much the two clocks may differ.

    Args:
        trace: what torch's profiler has written, whose marks are removed.
        ops: the ops, in seconds of this host.
        marks: each mark's name, and the seconds before and after it.
        process: the process that was traced.
    """
    events = trace["traceEvents"]
    seen = [x for x in events if x.get("name") in marks and x.get("ph") == "X"]
    offset_us, error_us = _offset_us(seen, marks)
    trace["hocket"] = {"clock_error_us": error_us}
    trace["traceEvents"] = [
        *(x for x in events if x.get("name") not in marks),
        *_names(ops, process),
        *_slices(ops, offset_us, process),
    ]


def _offset_us(
    seen: Sequence[_Event], marks: Mapping[str, tuple[float, float]]
) -> tuple[float, float]:
    """Return the microseconds to add to the host's, and by how much they may err."""

    def slack_us(mark: _Event) -> float:
        before_s, after_s = marks[mark["name"]]
        return 1e6 * (after_s - before_s) - float(mark["dur"])

    best = min(seen, key=slack_us)
    middle_s = sum(marks[best["name"]]) / 2
    offset_us = float(best["ts"]) + float(best["dur"]) / 2 - 1e6 * middle_s
    return offset_us, round(slack_us(best) / 2, 3)


def _names(ops: Sequence[TracedOp], process: int) -> Iterator[_Event]:
    for stream, lane in sorted({(op.stream, op.lane) for op in ops}):
        place = {"ph": "M", "pid": process, "tid": _FIRST_TRACK + stream}
        name = f"hocket's ops, lane {lane}"
        yield {**place, "name": "thread_name", "args": {"name": name}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": -1}}


def _slices(
    ops: Sequence[TracedOp], offset_us: float, process: int
) -> Iterator[_Event]:
    for number, one in enumerate(ops):
        facts = {"stage": one.op.stage, "step": one.op.step}
        if one.op.microbatch is not None:
            facts["microbatch"] = one.op.microbatch
        begin_us = round(1e6 * one.start_s + offset_us, 3)
        event: _Event = {
            "name": str(one.op),
            "cat": f"hocket, {KIND_NAMES[one.op.kind]}",
            "pid": process,
            "tid": _FIRST_TRACK + one.stream,
            "ts": begin_us,
            "args": facts,
        }
        end_us = round(1e6 * one.end_s + offset_us, 3)
        if one.op.kind not in ASYNCHRONOUS:
            yield {**event, "ph": "X", "dur": round(end_us - begin_us, 3)}
            continue
        yield {**event, "ph": "b", "id": number}
        yield {**event, "ph": "e", "id": number, "ts": end_us}
