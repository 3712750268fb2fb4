"""What is played ahead can be thrown away by all lanes together."""

from __future__ import annotations

import pytest

from hocket.core.ahead import lanes_ahead
from hocket.core.dataflow import makes, needs
from hocket.core.op import Kind
from hocket.core.schedule import Schedule
from hocket.errors import ShapeError
from hocket.schedules import SCHEDULES, make_schedule

V_SHAPE = """\
d0  0F0 3F0 3B0 0F1 3F1 3B1 0B0 0B1 0U 3U
d1  1F0 2F0 1F1 2F1 2B0 2B1 1B0 1B1 1U 2U
"""


def num_ahead(schedule: Schedule) -> list[int]:
    """Ops of each lane."""
    return [len(lane.ops) for lane in lanes_ahead(schedule)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpipe", [6, 6, 6, 0]),
        ("1f1b", [4, 3, 2, 0]),
        ("zb-h1", [4, 3, 2, 0]),
        ("zb-h2", [6, 5, 3, 0]),
    ],
)
def test_it_is_the_warm_up(name: str, expected: list[int]) -> None:
    """All forwards before the first backward, but those that make losses."""
    schedule = make_schedule(name, num_devices=4, num_microbatches=6)
    assert num_ahead(schedule) == expected


def test_it_ends_where_it_would_need_what_comes_later() -> None:
    """1F1 needs 0F1, which comes behind a loss and its backward."""
    assert num_ahead(Schedule.parse(V_SHAPE)) == [1, 2]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_it_is_closed(name: str, num_devices: int) -> None:
    """Forwards that make no loss, and need nothing but each other."""
    try:
        schedule = make_schedule(name, num_devices=num_devices, num_microbatches=8)
    except ShapeError:
        pytest.skip("the schedule does not take these numbers")
    program = schedule.program
    ahead = lanes_ahead(schedule)
    made = {x for lane in ahead for op in lane.ops for x in makes(op, program)}
    for lane, whole in zip(ahead, schedule.lanes, strict=True):
        assert lane.ops == whole.ops[: len(lane.ops)]
        for op in lane.ops:
            assert op.kind is Kind.FORWARD
            assert program.targets[op.stage]
            sources = program.sources[op.stage]
            read = [x for x in needs(op, program) if x.stage in sources]
            assert set(read) <= made
