"""Turn a schedule that is given into the order that the engine plays."""

from __future__ import annotations

from collections.abc import Iterator

from hocket.core.check import check
from hocket.core.op import Kind
from hocket.core.schedule import Schedule
from hocket.errors import ScheduleError
from hocket.passes.add_messages import drop_messages
from hocket.passes.segments import rewritten


def playable_order(schedule: Schedule) -> Schedule:
    """Return an order without messages, whose updates in one step are behind all else.

    The engine derives messages from the program.

    Raises:
        ScheduleError: it must not run, or has several steps and no body; says all.
    """
    check(schedule)  # with its messages, if it has any
    order = drop_messages(schedule)
    if not order.body:
        order = updates_last(order)
    faults = tuple(_body_faults(order))
    if faults:
        raise ScheduleError(faults, str(order))
    return order


def _body_faults(order: Schedule) -> Iterator[str]:
    """Return for what reasons an order needs a body that repeats."""
    if order.body:
        return
    if order.program.num_steps > 1:
        yield (
            f"the order has {order.program.num_steps} steps and no body that repeats: "
            "one step is enough, or some with a body between |: and :|"
        )
    for number, stage in enumerate(order.program.stages):
        if stage.delay:
            yield (
                f"stage {number} has delay {stage.delay}: such an order needs several "
                "steps, and a body that repeats"
            )


def updates_last(schedule: Schedule) -> Schedule:
    r"""Return the same order, with each device's updates behind all other ops.

    A runtime that updates nothing before it has seen all gradients of the model cannot
    update one stage of a device while another one's backwards are still to come.

    >>> print(updates_last(Schedule.parse("d0  0F0 1F0 1B0 1U 0B0 0U")))
    d0  0F0 1F0 1B0 0B0 1U 0U

    Args:
        schedule: a schedule of one step.
    """
    return rewritten(
        schedule, lambda ops: sorted(ops, key=lambda op: op.kind is Kind.UPDATE)
    )
