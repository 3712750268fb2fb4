"""Write timelines as trace events, for https://ui.perfetto.dev and chrome://tracing.

A device is a process, a lane a thread, an op a slice; messages are arrows from the op
that made a value to the op that waited for it, memory is a counter per device. What
runs beside a lane (messages, reductions) has tracks of its own.

Source: "Trace Event Format", the JSON that both viewers read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hocket.core.op import ASYNCHRONOUS
from hocket.core.schedule import Lane
from hocket.core.timelines.timeline import Span, Timeline
from hocket.draw.flows import Flow, flows
from hocket.draw.palette import KIND_NAMES
from hocket.draw.summary import knows_bytes, memory_curves

_Event = dict[str, Any]


def to_perfetto(timeline: Timeline) -> str:
    """Write a timeline as trace JSON; times count from the timeline's begin."""
    kinds = _names, _slices, _arrows, _counters
    events = [event for events_of in kinds for event in events_of(timeline)]
    document = {
        "displayTimeUnit": "ms",
        "otherData": {"origin": timeline.origin.value},
        "traceEvents": events,
    }
    return json.dumps(document, separators=(",", ":"))


def _names(timeline: Timeline) -> Iterator[_Event]:
    devices = sorted({lane.device for lane in timeline.schedule.lanes})
    for device in devices:
        yield _meta("process_name", device, 0, name=f"device {device}")
        yield _meta("process_sort_index", device, 0, sort_index=device)
    for lane in timeline.schedule.lanes:
        yield _meta("thread_name", lane.device, lane.stream, name=f"lane {lane.label}")
        yield _meta(
            "thread_sort_index", lane.device, lane.stream, sort_index=lane.stream
        )


def _meta(what: str, pid: int, tid: int, **args: str | int) -> _Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _slices(timeline: Timeline) -> Iterator[_Event]:
    for number, span in enumerate(timeline.spans):
        lane = timeline.schedule.lanes[span.lane]
        if span.op.kind not in ASYNCHRONOUS:
            yield {
                **_slice(timeline, span, lane),
                "ph": "X",
                "dur": _microseconds(span.end_s - span.start_s),
            }
            continue
        event = {**_slice(timeline, span, lane), "id": number}
        end = _microseconds(span.end_s - timeline.begin_s)
        yield {**event, "ph": "b"}
        yield {**event, "ph": "e", "ts": end}


def _slice(timeline: Timeline, span: Span, lane: Lane) -> _Event:
    facts = {"stage": span.op.stage, "step": span.op.step}
    if span.op.microbatch is not None:
        facts["microbatch"] = span.op.microbatch
    return {
        "name": str(span.op),
        "cat": KIND_NAMES[span.op.kind],
        "pid": lane.device,
        "tid": lane.stream,
        "ts": _microseconds(span.start_s - timeline.begin_s),
        "args": facts,
    }


def _arrows(timeline: Timeline) -> Iterator[_Event]:
    """Yield an arrow per op that reads a message; it binds to the slices around it."""
    for number, flow in enumerate(flows(timeline)):
        sender, reader = _end(timeline, flow, 0), _end(timeline, flow, 1)
        facts: _Event = {"name": "message", "cat": "message", "id": number}
        yield {**facts, **sender, "ph": "s"}
        yield {**facts, **reader, "ph": "f", "bp": "e"}


def _end(timeline: Timeline, flow: Flow, side: int) -> _Event:
    """Return the middle of the slice at one end of an arrow."""
    lane, index = (flow.maker, flow.reader)[side]
    start_s, end_s = timeline.start_s[lane][index], timeline.end_s[lane][index]
    facts = timeline.schedule.lanes[lane]
    middle = _microseconds((start_s + end_s) / 2 - timeline.begin_s)
    return {"pid": facts.device, "tid": facts.stream, "ts": middle}


def _counters(timeline: Timeline) -> Iterator[_Event]:
    name = "memory, bytes" if knows_bytes(timeline) else "activations, microbatches"
    for device, curve in enumerate(memory_curves(timeline)):
        changes = zip(curve.time_s.tolist(), curve.amount.tolist(), strict=True)
        for time_s, amount in changes:
            yield {
                "ph": "C",
                "name": name,
                "pid": device,
                "tid": 0,
                "ts": _microseconds(max(0.0, time_s - timeline.begin_s)),
                "args": {"alive": amount},
            }


def _microseconds(time_s: float) -> float:
    """Convert to microseconds; three decimals are a nanosecond."""
    return round(float(time_s) * 1e6, 3)
