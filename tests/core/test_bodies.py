"""Flush-free orders of every kind: with and without delays, I and W, several lanes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hocket.core.check import check
from hocket.core.costs import Costs
from hocket.core.plans.lane_plan import portions
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.errors import DeadlockError
from tests.core.plans.test_portions import played

# No stage reads old weights, and yet steps overlap: device 0 begins step 1 while
# device 1 has its W and U of step 0 still to do.
NO_DELAY = """
steps 2
net model microbatches=1
stage 0 net=model device=0
stage 1 net=model device=1
flow 0>1
d0  0F0 |: 0B0 0U 0F0@1 :| 0B0@1 0U@1
d1  1F0 1I0 |: 1W0 1U 1F0@1 1I0@1 :| 1W0@1 1U@1
"""
# The same with W and U of device 1 in a lane of their own.
SIDE_LANE = NO_DELAY.replace(
    "d1  1F0 1I0 |: 1W0 1U 1F0@1 1I0@1 :| 1W0@1 1U@1",
    "d1  1F0 1I0 |: 1F0@1 1I0@1 :|\nd1.1  |: 1W0 1U :| 1W0@1 1U@1",
)
# Delay 1 and halves: W and U stand behind I of the next step.
DELAY_AND_HALVES = """
steps 3
net model microbatches=1
stage 0 net=model device=0 delay=1
d0  0F0 0I0 0F0@1 |: 0I0@1 0W0 0U 0F0@2 :| 0I0@2 0W0@1 0U@1 0W0@2 0U@2
"""
HALF_A_STEP_BEHIND = """
steps 2
net model microbatches=2
stage 0 net=model device=0 delay=1
d0  0F0 0F1 |: 0I0 0W0 0F0@1 0I1 0F1@1 0W1 0U :| 0B0@1 0B1@1 0U@1
"""
# Step 1 adds to its gradients before step 0's update has read its own.
GRADIENTS_OF_TWO_STEPS = """
steps 3
net model microbatches=1
stage 0 net=model device=0 delay=1
d0  0F0 0F0@1 0B0 |: 0B0@1 0U 0F0@2 :| 0B0@2 0U@1 0U@2
"""
ORDERS = {
    "no delay": NO_DELAY,
    "side lane": SIDE_LANE,
    "delay and halves": DELAY_AND_HALVES,
    "half a step behind": HALF_A_STEP_BEHIND,
    "gradients of two steps": GRADIENTS_OF_TWO_STEPS,
}
every_order = pytest.mark.parametrize("name", ORDERS)


def order(name: str, num_steps: int = 0) -> Schedule:
    """An order with a body, for as many steps as it is written, or for others."""
    schedule = Schedule.parse(ORDERS[name])
    return schedule.with_num_steps(num_steps) if num_steps else schedule


@every_order
def test_may_run_for_any_number_of_steps(name: str) -> None:
    """The check passes, with the same counts however often the body is repeated."""
    least = portions(order(name)).num_steps
    proofs = {check(order(name, least + more)) for more in range(1, 5)}

    check(order(name))
    assert len(proofs) == 1


@every_order
def test_prints_and_parses(name: str) -> None:
    """The text form keeps an order's header, its body and all its lanes."""
    schedule = order(name)
    assert Schedule.parse(str(schedule)) == schedule


@every_order
def test_portions_together_are_the_order(name: str) -> None:
    """Prologue, as many bodies as there are further batches, epilogue, in each lane."""
    parts = portions(order(name))
    for num_bodies in range(4):
        whole = order(name, parts.num_steps + num_bodies)
        for i, lane in enumerate(whole.lanes):
            assert played(parts, i, num_bodies) == [*lane.ops]


@every_order
def test_each_further_step_takes_the_same_time(name: str) -> None:
    """The simulator plays it, and its body is steady."""
    ends_s = [simulate(order(name, n), Costs.uniform()).makespan_s for n in range(4, 8)]
    steps_s = {b - a for a, b in pairwise(ends_s)}

    assert len(steps_s) == 1


def test_without_delay_one_version_is_alive() -> None:
    """In every order that the events allow, also with a lane for W and U."""
    for name in ("no delay", "side lane"):
        proof = check(order(name, 5))
        assert proof.num_versions == (1, 1)
        assert proof.num_gradients == (1, 1)


def test_with_a_delay_two_steps_gradients_may_be_alive() -> None:
    """Overlapping steps need two sums of gradients, though one version is enough."""
    proof = check(order("gradients of two steps"))

    assert proof.num_gradients == (2,)
    assert proof.num_versions == (1,)
    assert check(order("delay and halves")).num_gradients == (1,)


def test_a_body_that_reads_weights_too_early_is_refused() -> None:
    """Step 1 needs the weights after step 0's update, if the delay is 0."""
    early = NO_DELAY.replace("0B0 0U 0F0@1", "0F0@1 0B0 0U")

    with pytest.raises(DeadlockError, match=r"weights\[stage 0, after 1 updates\]"):
        check(Schedule.parse(early))
