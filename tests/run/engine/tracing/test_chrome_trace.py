"""Traces show ops at torch's times, which the most exact mark converts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.op import Op
from hocket.run.engine.tracing.step_profiler import TracedOp, add_ops

PROCESS = 17


def mark(name: str, ts: float, dur: float) -> dict[str, Any]:
    """What torch writes of a mark."""
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "pid": PROCESS, "tid": 3}


def op(text: str, start_s: float, end_s: float, stream: int = 0) -> TracedOp:
    """An op of device 1."""
    lane = f"d1.{stream}" if stream else "d1"
    return TracedOp(Op.parse(text), lane, stream, start_s, end_s)


@given(
    offset_us=st.integers(-(10**9), 10**9),
    delays_us=st.lists(st.integers(1, 10**6), min_size=1, max_size=4),
    start_ms=st.integers(0, 10**6),
)
def test_the_tightest_mark_gives_the_offset(
    offset_us: int, delays_us: list[int], start_ms: int
) -> None:
    """However long the others waited, on one side, for a core."""
    delays_us = [0, *delays_us]  # the first waited for nothing
    marks, events = {}, []
    for i, delay_us in enumerate(delays_us):
        begin_us = 1e7 * i
        marks[f"mark {i}"] = begin_us / 1e6, (begin_us + 4 + delay_us) / 1e6
        events.append(mark(f"mark {i}", begin_us + 1 + offset_us, 2.0))
    trace = {"traceEvents": events}
    add_ops(trace, [op("0F0@3", start_ms / 1e3, start_ms / 1e3 + 1)], marks, PROCESS)

    (span,) = [x for x in trace["traceEvents"] if x["ph"] == "X"]
    assert span["name"] == "0F0@3"
    assert span["args"] == {"stage": 0, "step": 3, "microbatch": 0}
    assert span["ts"] == pytest.approx(1e3 * start_ms + offset_us, abs=0.01)
    assert span["dur"] == pytest.approx(1e6, abs=0.01)


def test_each_lane_has_a_track_above_torchs() -> None:
    """Named, in the process that was traced; reductions last beside others."""
    torch_event = {"ph": "X", "name": "aten::mm", "ts": 5.0, "dur": 1.0}
    trace = {"traceEvents": [mark("m", 1.0, 2.0), torch_event]}
    ops = [op("0F0", 0.0, 1.0), op("0B0", 1.0, 2.0, stream=1), op("0R", 2.0, 9.0)]
    add_ops(trace, ops, {"m": (0.0, 4e-6)}, PROCESS)

    events = trace["traceEvents"]
    assert events[0] == torch_event
    names = {x["tid"]: x["args"]["name"] for x in events if x["name"] == "thread_name"}
    assert [*names.values()] == ["hocket's ops, lane d1", "hocket's ops, lane d1.1"]
    tracks = {x["name"]: x["tid"] for x in events if x.get("cat", "")[:6] == "hocket"}
    first, second = names
    assert tracks == {"0F0": first, "0B0": second, "0R": first}
    assert [x["ph"] for x in events if x["name"] == "0R"] == ["b", "e"]
    assert {x["pid"] for x in events[1:]} == {PROCESS}
