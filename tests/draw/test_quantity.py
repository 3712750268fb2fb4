"""Numbers as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.draw.quantity import byte_size, percent, seconds, short, ticks

amounts = st.floats(1e-9, 1e12)


@given(limit=amounts, most=st.integers(1, 20))
def test_ticks_are_round_few_and_within_the_limit(limit: float, most: int) -> None:
    """An axis begins at 0, has at most `most` gaps, and all of them are 1, 2 or 5."""
    marks = ticks(limit, most)

    assert marks[0] == 0.0
    assert len(marks) <= most + 1
    assert marks[-1] <= limit * (1 + 1e-6)
    assert marks == sorted(marks)
    if len(marks) > 1:
        leading = f"{marks[1]:.6e}"
        assert leading.split("e")[0] in ("1.000000", "2.000000", "5.000000")


def test_an_axis_without_length_has_one_tick() -> None:
    """A timeline in which nothing takes time can be drawn."""
    assert ticks(0.0, 8) == [0.0]


@given(number=amounts)
def test_short_numbers_are_right_to_four_digits(number: float) -> None:
    """A written number reads back as the number."""
    assert float(short(number).replace(",", "")) == pytest.approx(number, rel=5e-4)


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0.0, "0 s"),
        (1.5, "1.5 s"),
        (0.0125, "12.5 ms"),
        (3e-6, "3 µs"),
        (2e-10, "0.2 ns"),
    ],
)
def test_times_have_the_unit_that_fits(time_s: float, text: str) -> None:
    """From seconds to nanoseconds."""
    assert seconds(time_s) == text


def test_bytes_and_shares() -> None:
    """Binary units; one decimal of a percent, and a zero that is no negative zero."""
    assert byte_size(1536) == "1.5 KiB"
    assert byte_size(0) == "0 B"
    assert percent(3 / 11) == "27.3 %"
    assert percent(-1e-9) == "0 %"
