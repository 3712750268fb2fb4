"""The closed forms of ZB-V that are not in the table."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hocket.core.costs import Costs
from hocket.core.simulate import simulate
from hocket.errors import ShapeError
from hocket.schedules import make_schedule


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 8), (4, 7), (8, 24)])
def test_no_device_waits_between_its_ops(p: int, m: int) -> None:
    """All that is idle is before a device's first op, and after its last."""
    timeline = simulate(
        make_schedule("zb-v", num_devices=p, num_microbatches=m), Costs.uniform()
    )
    for starts, ends in zip(timeline.start_s, timeline.end_s, strict=True):
        assert ends[:-2] == pytest.approx(starts[1:-1])


def test_the_next_step_begins_where_this_one_ends() -> None:
    """Who begins late ends late: the way of a first forward is paid once."""
    makespans = [
        simulate(
            make_schedule("zb-v", num_devices=4, num_microbatches=8, num_steps=n),
            Costs.uniform(),
        ).makespan_s
        for n in (1, 2, 3)
    ]
    assert [after - before for before, after in pairwise(makespans)] == [24.0, 24.0]


def test_refuses_other_numbers_of_stages() -> None:
    """The error names a schedule that takes several stages."""
    with pytest.raises(ShapeError, match=r"stages_per_device=3: use 2, or interleaved"):
        make_schedule("zb-v", num_devices=2, num_microbatches=4, stages_per_device=3)
