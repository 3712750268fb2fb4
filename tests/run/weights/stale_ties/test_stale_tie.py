"""One stage owns each stale tied weight; orders in which it cannot are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.schedule import Schedule
from hocket.errors import ModelError
from hocket.run.engine.refusals import refuse_shared
from hocket.run.weights.stale_ties.stale_tie import StaleTie, find_stale_ties
from hocket.schedules import make_schedule

NAMES = ("wpipe", "wpipe-overlapped", "pipedream")

MIXED = """\
steps 3
replicas 1
net model microbatches=1
stage 0 net=model device=0 delay=1
stage 1 net=model device=0
flow 0>1
d0  0F0 1F0 |: 1B0 1U 0F0@1 1F0@1 0B0 0U :| 1B0@1 1U@1 0F0@2 1F0@2 1B0@2 0B0@1 0U@1 \
1U@2 0B0@2 0U@2
"""


def test_equal_delays_on_other_devices_meet_at_the_update() -> None:
    """2BW has no stale ties; in WPipe the first of the stages owns the weight."""
    shared = {"wte": (0, 3), "head": (1, 2)}
    order = make_schedule("pipedream-2bw", num_devices=4, num_microbatches=4)
    assert find_stale_ties(shared, order) == []
    order = make_schedule("wpipe", num_devices=2, num_microbatches=4, num_steps=6)
    assert find_stale_ties(shared, order) == [
        StaleTie("head", (1, 2), (1, 0), 1),
        StaleTie("wte", (0, 3), (0, 1), 1),
    ]


@given(
    name=st.sampled_from(NAMES),
    p=st.integers(1, 4),
    more=st.integers(0, 4),
    late=st.booleans(),
    data=st.data(),
)
def test_the_first_stage_owns_the_weight_in_every_order(
    name: str, p: int, more: int, data: st.DataObject, *, late: bool
) -> None:
    """The first stage has the largest delay, whichever stages share a weight.

    So no order is refused, with updates in time or late. A weight has no stale tie only
    if its stages have one delay and lie on different devices.
    """
    m = 1 if name == "pipedream" else max(p, 2 * (p - 1)) + more
    options = {} if name == "pipedream" else {"late_updates": late}
    order = make_schedule(
        name, num_devices=p, num_microbatches=m, num_steps=6, **options
    )
    num = order.program.num_stages
    if num == 1:
        return
    stages = data.draw(st.lists(st.integers(0, num - 1), min_size=2, unique=True))
    numbers = sorted(stages)
    ties = find_stale_ties({"w": numbers}, order)
    refuse_shared(ties, order)

    delays = [order.program.stages[x].delay for x in numbers]
    devices = [order.program.stages[x].device for x in numbers]
    if len({*delays}) == 1 and len({*devices}) == len(numbers):
        assert ties == []
        return
    [tie] = ties
    assert (tie.name, tie.stages) == ("w", (*numbers,))
    assert tie.delay == delays[0] == max(delays) > 0
    assert tie.devices[0] == devices[0]
    assert sorted(tie.devices) == sorted({*devices})


def test_a_first_stage_of_less_delay_is_refused() -> None:
    """The error says the delays, and to untie the weight."""
    order = make_schedule("wpipe", num_devices=2, num_microbatches=4, num_steps=6)
    text = str(order).replace(
        "stage 3 net=model device=1", "stage 3 net=model device=1 delay=1"
    )
    stale_ties = find_stale_ties({"w": (2, 3)}, Schedule.parse(text))
    with pytest.raises(ModelError, match=r"their delays are 0, 1: .* Untie the"):
        refuse_shared(stale_ties, Schedule.parse(text))


def test_gradients_of_two_steps_do_not_mix() -> None:
    """An order is refused where two steps read one version of a shared weight."""
    order = Schedule.parse(MIXED)
    with pytest.raises(ModelError, match="the gradients of two steps would mix"):
        refuse_shared(find_stale_ties({"w": (0, 1)}, order), order)
