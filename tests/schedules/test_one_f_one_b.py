"""The closed forms of 1F1B that are not in the table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.costs import Costs
from hocket.core.op import Kind, Op
from hocket.core.simulate import simulate
from hocket.schedules import make_schedule
from hocket.schedules.one_f_one_b import alternate


@given(p=st.integers(1, 8), m=st.integers(1, 16))
def test_takes_as_long_as_the_paper_says(p: int, m: int) -> None:
    """Section 2.2.1 of arXiv:2104.04473: `m + p - 1` slots of one F and one B."""
    schedule = make_schedule("1f1b", num_devices=p, num_microbatches=m)
    costs = Costs.uniform(forward_s=2.0, input_grad_s=3.0, weight_grad_s=1.0)
    assert simulate(schedule, costs).makespan_s == (m + p - 1) * (2.0 + 3.0 + 1.0)


def test_messages_that_take_time_lengthen_the_steady_state() -> None:
    """Neighbours whose warm-ups differ by one wait for each message, there and back.

    Each further microbatch costs `F + B + 2c(p - 1) / p`, where a message takes `c`.
    """
    short, long = (
        simulate(
            make_schedule("1f1b", num_devices=2, num_microbatches=m),
            Costs.uniform(message_s=0.25),
        ).makespan_s
        for m in (20, 40)
    )
    assert (long - short) / 20 == pytest.approx(3.0 + 2 * 0.25 * (2 - 1) / 2)


@given(
    num_pairs=st.integers(0, 6),
    num_warmup=st.integers(0, 9),
)
def test_alternating_loses_nothing_and_keeps_both_orders(
    num_pairs: int, num_warmup: int
) -> None:
    """All forwards in order, all backwards in order, and the warm-up in flight."""
    forwards = [Op(Kind.FORWARD, 0, i) for i in range(num_pairs)]
    backwards = [Op(Kind.BACKWARD, 0, i) for i in range(num_pairs)]
    ops = list(alternate(forwards, backwards, num_warmup=num_warmup))
    assert [op for op in ops if op.kind is Kind.FORWARD] == forwards
    assert [op for op in ops if op.kind is Kind.BACKWARD] == backwards
    in_flight = [
        sum(1 if op.kind is Kind.FORWARD else -1 for op in ops[: i + 1])
        for i in range(len(ops))
    ]
    assert max(in_flight, default=0) == min(num_warmup + 1, num_pairs)
