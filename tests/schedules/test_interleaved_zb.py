"""The closed forms of interleaved zero bubble that are not in the table."""

from __future__ import annotations

import pytest

from hocket.errors import ShapeError
from hocket.schedules import make_schedule


def test_with_one_stage_per_device_it_is_zb_h1() -> None:
    """The one schedule is the other's case of `v = 1`."""
    interleaved = make_schedule(
        "interleaved-zb", num_devices=4, num_microbatches=8, stages_per_device=1
    )
    assert interleaved == make_schedule("zb-h1", num_devices=4, num_microbatches=8)


@pytest.mark.parametrize(
    ("p", "m", "numbers"), [(4, 9, "8 or 10"), (5, 13, "12 or 14")]
)
def test_refuses_rounds_of_unequal_length(p: int, m: int, numbers: str) -> None:
    """The error names the schedule, and the nearest numbers that would work."""
    with pytest.raises(ShapeError, match=rf"^interleaved-zb .*use {numbers} micro"):
        make_schedule("interleaved-zb", num_devices=p, num_microbatches=m)
