"""Orders repeat for more steps, and refuse bodies that are no repetition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.check import check
from hocket.core.costs import Costs, StageCost
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule
from hocket.core.simulate import simulate
from hocket.errors import ParseError, PlanError
from hocket.passes.add_messages import add_messages
from hocket.schedules import make_schedule

ONE_STEP: Final = make_schedule("1f1b", num_devices=2, num_microbatches=2)
ORDERS: Final = Path(__file__).parent / "orders"

# What the papers promise of the two orders in files: versions of each stage's weights,
# and the cost of a stage with which the steady state has no bubble.
PROMISES: Final = {
    "wpipe": ((2, 2, 1, 1), StageCost(1.0, 1.0, 1.0)),
    "tspipe": ((1, 1, 1, 1), StageCost(1.0, 0.5, 0.5)),
}


def order_in(name: str) -> Schedule:
    """A flush-free order, from its file."""
    path = ORDERS / f"{name}.txt"
    return Schedule.parse(path.read_text(), path=str(path))


@pytest.mark.parametrize("name", PROMISES)
def test_flush_free_orders_need_no_other_types(name: str) -> None:
    """WPipe and TSPipe are right, print, and keep the versions that they promise."""
    schedule = order_in(name)
    assert Schedule.parse(str(schedule)) == schedule
    assert check(schedule).num_versions == PROMISES[name][0]


@pytest.mark.parametrize("name", PROMISES)
@pytest.mark.parametrize("num_steps", [2, 3, 4, 9])
def test_flush_free_orders_run_for_any_number_of_steps(
    name: str, num_steps: int
) -> None:
    """Prologue and epilogue stay; the body is repeated, and nothing is dropped."""
    schedule = order_in(name)
    longer = schedule.with_num_steps(num_steps)
    check(longer)
    assert longer.program.num_steps == num_steps
    assert longer.num_repeats == num_steps - 1
    assert longer.with_num_steps(3) == schedule


@pytest.mark.parametrize("name", PROMISES)
def test_flush_free_orders_have_no_bubble_in_their_body(name: str) -> None:
    """No device waits while a backward costs what the paper assumes."""
    schedule = order_in(name).with_num_steps(6)
    costs = Costs((PROMISES[name][1],) * 4)
    timeline = simulate(schedule, costs)
    assert timeline.steady_bubble_fraction == pytest.approx(0.0)
    assert timeline.bubble_fraction > 0.01


def test_a_synchronous_order_repeats_whole() -> None:
    """Each step is the first one again, with its number."""
    once = Schedule.parse("d0  0F0 0B0 0U\nd1  1F0 1B0 1U")
    twice = Schedule.parse(
        "d0  0F0 0B0 0U 0F0@1 0B0@1 0U@1\nd1  1F0 1B0 1U 1F0@1 1B0@1 1U@1"
    )
    assert once.with_num_steps(2) == twice
    assert once.with_num_steps(1) == once


@pytest.mark.parametrize(
    ("schedule", "num_steps", "reason"),
    [
        *((order_in(name), 1, "a body from 2 steps on") for name in PROMISES),
        # The order of several steps does not say what the next one is.
        (Schedule.parse("d0  0F0 0B0 0U 0F0@1 0B0@1 0U@1"), 3, "make it for one step"),
        # Messages reach from one step into the next.
        (add_messages(ONE_STEP), 2, "choose the number of steps first"),
        (ONE_STEP, 0, "num_steps is 0"),
    ],
)
def test_refuses_numbers_of_steps(
    schedule: Schedule, num_steps: int, reason: str
) -> None:
    """The number that would do is named, or what to do before."""
    with pytest.raises(PlanError, match=reason):
        schedule.with_num_steps(num_steps)


@pytest.mark.parametrize(
    ("body", "num_repeats", "reason"),
    [
        (((0, 2),), 1, "1 ranges for 2 lanes"),
        (((0, 2), (0, 2)), 0, "0 repetitions"),
        (((0, 4), (0, 2)), 1, "ops 0 to 4 of 3"),
        (((2, 1), (0, 2)), 1, "ops 2 to 1 of 3"),
        (((0, 3), (0, 2)), 2, "is not 2 equal repetitions"),
    ],
)
def test_refuses_bodies_that_are_none(
    body: tuple[tuple[int, int], ...], num_repeats: int, reason: str
) -> None:
    """A body is a whole number of repetitions on every lane."""
    once = Schedule.parse("d0  0F0 0B0 0U\nd1  1F0 1B0 1U")
    with pytest.raises(PlanError, match=reason):
        replace(once, body=body, num_repeats=num_repeats)


@given(num_steps=st.integers(1, 4), num_devices=st.integers(1, 3))
def test_knows_its_size_and_its_lanes(num_steps: int, num_devices: int) -> None:
    """Per step and device: a forward, a backward and an update."""
    schedule = make_schedule(
        "1f1b", num_devices=num_devices, num_microbatches=1, num_steps=num_steps
    )
    assert schedule.num_ops == 3 * num_steps * num_devices
    assert [schedule.lanes_of(d) for d in range(num_devices)] == [
        (d,) for d in range(num_devices)
    ]


def test_a_device_may_have_several_lanes() -> None:
    """Out of order on one device: weight gradients on a stream of their own."""
    schedule = Schedule.parse("d0  0F0 1F0 1I0 0I0 0U 1U\nd0.1  1W0 0W0")
    assert schedule.program == Program.chain([0, 0], 1)
    assert schedule.lanes_of(0) == (0, 1)
    assert [lane.label for lane in schedule.lanes] == ["d0", "d0.1"]
    assert isinstance(schedule.lanes[1], Lane)
    check(schedule)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none.csv", "No such file or directory"),
        (".", "Is a directory"),
        ("a\0b", "embedded null byte"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_file_that_cannot_be_opened_is_named_with_the_reason(
    name: str, reason: str, tmp_path: Path
) -> None:
    """Such an error has no line."""
    path = tmp_path / name
    with pytest.raises(ParseError) as caught:
        Schedule.from_csv(path)
    assert str(caught.value) == f"{path}: cannot be read: {reason}"


def test_refuses_a_file_that_is_no_text(tmp_path: Path) -> None:
    """The error names the file."""
    path = tmp_path / "order.csv"
    path.write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ParseError, match=r"order\.csv, line 1: is not text in UTF-8"):
        Schedule.from_csv(path)
