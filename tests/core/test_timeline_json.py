"""Timelines as JSON: read back as they were, or refused with the place at fault."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.timeline import DataWait, Origin, Timeline
from hocket.errors import ParseError
from tests.core.random_orders import costs_for, orders

Document = dict[str, Any]

COST = StageCost(
    1 / 3, 0.1, 0.2, output_bytes=7, input_grad_bytes=3, activation_bytes=5
)
TIMELINE = simulate(
    Schedule.parse("d0  0F0 0F1 0B0 0B1 0U\nd1  1F0 1B0 1F1 1B1 1U"),
    Costs((COST, COST), link=Link(0.7, 3.0)),
)


def assert_same(one: Timeline, other: Timeline) -> None:
    """Equal to the last bit, field by field."""
    assert one.schedule == other.schedule
    assert one.origin == other.origin
    assert one.data_waits == other.data_waits
    for ours, theirs in ((one.start_s, other.start_s), (one.end_s, other.end_s)):
        assert [a.tolist() for a in ours] == [a.tolist() for a in theirs]
    for column in fields(one.traffic):
        ours_column = getattr(one.traffic, column.name)
        theirs_column = getattr(other.traffic, column.name)
        assert ours_column.tolist() == theirs_column.tolist()
        assert ours_column.dtype == theirs_column.dtype
    assert [(c.time_s.tolist(), c.amount.tolist()) for c in one.memory] == [
        (c.time_s.tolist(), c.amount.tolist()) for c in other.memory
    ]


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(schedule=orders(), data=st.data())
def test_is_read_back_as_it_was(schedule: Schedule, data: st.DataObject) -> None:
    """Any schedule, with its traffic and its memory."""
    timeline = simulate(schedule, data.draw(costs_for(schedule.program)))

    assert_same(Timeline.from_json(timeline.to_json()), timeline)


def test_keeps_what_floats_round() -> None:
    """Thirds and tenths come back to the last bit."""
    assert_same(Timeline.from_json(TIMELINE.to_json()), TIMELINE)


def test_keeps_where_it_comes_from() -> None:
    """A measured timeline without traffic or memory."""
    measured = Timeline(
        TIMELINE.schedule,
        TIMELINE.start_s,
        TIMELINE.end_s,
        origin=Origin.MEASURED,
        data_waits=(DataWait(1, -1 / 3, 0.0), DataWait(0, -0.1, 0.1)),
    )

    assert_same(Timeline.from_json(measured.to_json()), measured)


def put(value: object, *path: str | int) -> Callable[[Document], None]:
    """A change: set the value at a path."""

    def change(document: Document) -> None:
        place: Any = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def drop(*path: str | int) -> Callable[[Document], None]:
    """A change: leave out what is at a path."""

    def change(document: Document) -> None:
        place: Any = document
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("end_s"), "the document has no end_s"),
        (put(1, "colour"), "the document has 'colour'; known: hocket_timeline"),
        (put(2, "hocket_timeline"), "hocket_timeline is 2, expected 1"),
        (put("dreamt", "origin"), "origin is 'dreamt', expected simulated or"),
        (put([], "origin"), r"origin is \[\], expected simulated or"),
        (put(3, "schedule"), "schedule is not text"),
        (put("d0  0F0 0X0", "schedule"), ", schedule, line 1: '0X0' is"),
        (put(5, "start_s"), "start_s is not a list"),
        (drop("start_s", 1), "start_s holds 1 entries, expected 2, one per lane"),
        (
            drop("end_s", 0, 2),
            r"end_s\[0\] holds 4 entries, expected 5, one per op of d0",
        ),
        (put("1", "start_s", 0, 1), r"start_s\[0\]\[1\] is '1', not a finite"),
        (put(True, "start_s", 0, 1), r"start_s\[0\]\[1\] is True, not a finite"),
        (put(float("inf"), "end_s", 1, 0), r"end_s\[1\]\[0\] is inf, not a finite"),
        (put(float("nan"), "end_s", 1, 0), r"end_s\[1\]\[0\] is nan, not a finite"),
        (put(10**400, "end_s", 1, 0), r"end_s\[1\]\[0\] is 10+\.\.\.0+, not a finite"),
        (put(0.0, "end_s", 1, 1), r"end_s\[1\]\[1\] 1B0 ends before it"),
        (put([], "traffic"), "traffic is not an object with lane, position"),
        (drop("traffic", "lane", 0), "traffic.position holds 4 entries, expected 3"),
        (put(2, "traffic", "lane", 0), r"traffic.lane\[0\] is 2, not a whole numb"),
        (put(0.0, "traffic", "lane", 0), r"traffic.lane\[0\] is 0.0, not a whole"),
        (put(9, "traffic", "position", 1), r"position\[1\] is 9, and lane 0 has 5"),
        (put(-1, "traffic", "to_device", 0), r"to_device\[0\] is -1, not a whole"),
        (put(2**63, "traffic", "num_bytes", 0), r"num_bytes\[0\] is 9\d+, not a"),
        (put([[0, 1.0]], "data_waits"), r"data_waits\[0\] holds 2 entries, exp"),
        (put([[2, 0, 1]], "data_waits"), r"data_waits\[0\]\[0\] is 2, not a who"),
        (put([[1, 1, 0]], "data_waits"), r"data_waits\[0\] ends before it start"),
        (drop("memory", 0), "memory holds 1 entries, expected 2, one per device"),
        (put({}, "memory", 1), r"memory\[1\] has no time_s"),
        (
            drop("memory", 0, "amount", 0),
            r"memory\[0\].amount holds \d+ entries, expec",
        ),
        (
            put(99, "memory", 0, "time_s", 0),
            r"memory\[0\].time_s\[1\] is \S+, after 99.0; expected an asc",
        ),
    ],
)
def test_names_what_is_wrong_where(
    change: Callable[[Document], None], message: str
) -> None:
    """The error begins with the file's path."""
    document = json.loads(TIMELINE.to_json())
    change(document)

    with pytest.raises(ParseError, match=rf"^run\.json.*{message}"):
        Timeline.from_json(json.dumps(document), path="run.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"x"', "[" * 100_000])
def test_refuses_what_is_no_timeline(text: str) -> None:
    """Files of another kind, and files cut short."""
    with pytest.raises(ParseError, match=r"run\.json: "):
        Timeline.from_json(text, path="run.json")


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["time_s", "amount", "lane"]), inner)
    ),
    max_leaves=5,
)


@given(data=st.data(), value=junk)
def test_no_other_error_whatever_stands_in_the_file(
    data: st.DataObject, value: object
) -> None:
    """Junk at any place is refused by its entry, or read as the number that it is."""
    document = copy.deepcopy(json.loads(TIMELINE.to_json()))
    place: Any = document
    while True:
        keys = [*place] if isinstance(place, dict) else [*range(len(place))]
        key = data.draw(st.sampled_from(keys))
        if (
            not isinstance(place[key], dict | list)
            or not place[key]
            or data.draw(st.booleans())
        ):
            break
        place = place[key]
    place[key] = value

    text = json.dumps(document)
    try:
        written = Timeline.from_json(text, path="run.json").to_json()
    except ParseError as error:
        message = str(error)
    else:
        assert as_floats(written) == as_floats(text)
        return
    assert re.match(NAMES_AN_ENTRY, message)


NAMES_AN_ENTRY = (
    r"run\.json(, schedule, line \d+:|: (the document|schedule|hocket_timeline|origin|"
    r"(start_s|end_s)(\[\d+\])*|traffic(\.\w+(\[\d+\])?)?|"
    r"memory(\[\d+\](\.\w+(\[\d+\])?)?)?) )"
)


def as_floats(text: str) -> object:
    """Read JSON with whole numbers as the nearest float, as columns hold them."""
    return json.loads(text, parse_int=float)
