"""Move the updates to the end of each lane, behind all gradients."""

from __future__ import annotations

from hocket.core.op import Kind
from hocket.core.schedule import Schedule
from hocket.passes.segments import rewritten


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
