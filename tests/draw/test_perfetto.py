"""Traces for ui.perfetto.dev."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from hocket.core.op import ASYNCHRONOUS
from hocket.core.timelines.timeline import Timeline
from hocket.draw.perfetto import to_perfetto
from tests.draw.timelines import REAL, measured, simulated, teacher_and_student


def events_of(timeline: Timeline) -> dict[str, list[dict[str, Any]]]:
    """The events of a trace by what they are."""
    events: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in json.loads(to_perfetto(timeline))["traceEvents"]:
        events[event["ph"]].append(event)
    return events


def test_every_op_is_a_slice_at_its_time() -> None:
    """In microseconds since the first op, to the nanosecond."""
    timeline = measured(simulated("1f1b", 3, 4, num_steps=2, costs=REAL))
    slices = events_of(timeline)["X"]
    spans = [span for span in timeline.spans if span.op.kind not in ASYNCHRONOUS]

    assert [event["name"] for event in slices] == [str(span.op) for span in spans]
    for event, span in zip(slices, spans, strict=True):
        start_s = span.start_s - timeline.begin_s
        assert event["ts"] == pytest.approx(start_s * 1e6, abs=1e-3)
        assert event["dur"] == pytest.approx(
            (span.end_s - span.start_s) * 1e6, abs=1e-3
        )
        assert event["pid"] == timeline.schedule.lanes[span.lane].device


def test_a_device_is_a_process_and_a_lane_a_thread() -> None:
    """Device 1 of the two has two of them."""
    names = events_of(teacher_and_student())["M"]
    threads = [e for e in names if e["name"] == "thread_name"]

    assert [(e["pid"], e["tid"], e["args"]["name"]) for e in threads] == [
        (0, 0, "lane d0"),
        (1, 0, "lane d1"),
        (1, 1, "lane d1.1"),
    ]


def test_an_arrow_binds_to_the_slices_at_both_its_ends() -> None:
    """A viewer drops arrows whose ends lie in no slice."""
    timeline = simulated("1f1b", 3, 4, costs=REAL, message_s=1e-4)
    events = events_of(timeline)

    assert len(events["s"]) == len(events["f"]) == 2 * 2 * 4
    assert {e["id"] for e in events["s"]} == {e["id"] for e in events["f"]}
    for end in events["s"] + events["f"]:
        around = [
            e
            for e in events["X"]
            if (e["pid"], e["tid"]) == (end["pid"], end["tid"])
            and e["ts"] <= end["ts"] <= e["ts"] + e["dur"]
        ]
        assert len(around) == 1


def test_what_runs_beside_a_lane_has_a_track_of_its_own() -> None:
    """Slices of one thread must nest: a reduction overlaps with the ops after it."""
    timeline = simulated("1f1b", 2, 4, num_replicas=2, costs=REAL)
    events = events_of(timeline)

    assert [e["name"] for e in events["b"]] == ["0R", "1R"]
    for begin, end in zip(events["b"], events["e"], strict=True):
        assert begin["id"] == end["id"]
        assert begin["ts"] < end["ts"]


def test_the_counter_of_each_device_has_its_peak() -> None:
    """Bytes where they are known, microbatches otherwise."""
    for timeline in (simulated("1f1b", 3, 4, costs=REAL), simulated("1f1b", 3, 4)):
        peaks: dict[int, float] = defaultdict(float)
        for event in events_of(timeline)["C"]:
            peaks[event["pid"]] = max(peaks[event["pid"]], event["args"]["alive"])
        for device in range(3):
            expected = timeline.peak_bytes(device) or timeline.peak_activations(device)
            assert peaks[device] == expected
