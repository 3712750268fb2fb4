"""Pictures for terminals."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.costs import StageCost
from hocket.draw.palette import Theme
from hocket.draw.text import to_text
from tests.draw.timelines import REAL, measured, simulated, teacher_and_student

sizes = st.integers(1, 6)


def rows(text: str) -> list[str]:
    """The columns of time of each lane."""
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line[0] == "d"]


@given(p=sizes, m=sizes)
def test_points_are_the_bubble(p: int, m: int) -> None:
    """Counting points gives each lane's bubble, if columns are exact."""
    timeline = simulated("1f1b", p, m)
    text = to_text(timeline, width=400)
    for lane, line in enumerate(line for line in text.splitlines() if line[0] == "d"):
        row = line[4 : len(text.splitlines()[0]) - len("   bubble  peak")]
        assert row.count(".") / len(row) == pytest.approx(
            timeline.lane_bubble_fraction(lane)
        )


@given(p=sizes, m=st.integers(1, 40), width=st.integers(60, 120))
def test_no_line_is_wider_than_asked(p: int, m: int, width: int) -> None:
    """Whatever the number of ops; and no line ends with blanks."""
    text = to_text(simulated("gpipe", p, m, num_steps=2, costs=REAL), width=width)

    assert max(map(len, text.splitlines())) <= width
    assert all(line == line.rstrip() for line in text.splitlines())


def test_the_picture_of_1f1b(golden: Callable[[str, str], None]) -> None:
    """The picture that the documentation shows."""
    golden("draw/1f1b.txt", to_text(simulated("1f1b", 4, 8), width=120) + "\n")


def test_steps_stages_and_reductions(golden: Callable[[str, str], None]) -> None:
    """Steps are named above, stages where a device has several; R is left out."""
    timeline = simulated(
        "interleaved-1f1b", 2, 4, num_steps=2, num_replicas=2, costs=REAL
    )
    golden("draw/interleaved.txt", to_text(timeline, width=150) + "\n")


def test_two_lanes_of_a_device_are_two_rows(golden: Callable[[str, str], None]) -> None:
    """The teacher's stream beside the student's, on the same axis."""
    golden("draw/teacher.txt", to_text(teacher_and_student(), width=100) + "\n")


def test_a_clock_that_began_before_changes_nothing() -> None:
    """Measured times count from the first op, as simulated ones do."""
    timeline = simulated("1f1b", 3, 4, num_steps=2, costs=REAL, message_s=1e-4)
    pictures = [to_text(one, width=90) for one in (timeline, measured(timeline))]

    assert rows(pictures[0])[:3] == rows(pictures[1])[:3]


def test_crowded_columns_are_work_where_work_is_the_most() -> None:
    """500 microbatches in 40 columns: a full lane shows no bubble."""
    full, half = simulated("gpipe", 1, 500), simulated("gpipe", 2, 500)

    assert "." not in rows(to_text(full, width=60))[0].split()[0]
    assert rows(to_text(half, width=60))[0].split()[0].count(".") <= 1


def test_ops_without_duration_are_left_out() -> None:
    """Updates that cost nothing take no column."""
    assert "U" not in to_text(simulated("1f1b", 2, 2))


def test_nothing_takes_time() -> None:
    """A timeline of length zero is drawn, not divided by."""
    text = to_text(simulated("1f1b", 2, 2, costs=StageCost()))

    assert text.splitlines()[-1] == "makespan 0 s, bubble 0 %, steady 0 %"


@pytest.mark.parametrize("theme", Theme)
def test_colours_change_no_character(theme: Theme) -> None:
    """A coloured picture has the same letters without its escape sequences."""
    timeline = simulated("1f1b", 3, 4)
    plain = to_text(timeline, width=90)
    coloured = to_text(timeline, width=90, colour=theme)
    stripped = re.sub("\x1b\\[[0-9;]*m", "", coloured)

    assert "\x1b[" in coloured
    assert stripped == plain.replace("-", " ")
