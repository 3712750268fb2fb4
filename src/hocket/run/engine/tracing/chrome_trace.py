"""Adds the ops of lanes to a trace of torch's, on torch's clock.

    host's clock     before_s ├────────────┤ after_s      perf_counter
    torch's clock         ts ├──────────┤ ts + dur        microseconds

Torch's profiler has a clock of its own. A few marks are recorded with the host's time
before and after; the one with the least between them gives the offset, to within half
of what is between.

Source: "Trace Event Format", the JSON that Perfetto and chrome://tracing read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hocket.core.op import ASYNCHRONOUS, Op
from hocket.draw.palette import KIND_NAMES

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
