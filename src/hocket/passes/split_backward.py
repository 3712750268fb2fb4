"""Split each backward into I, which the stage before waits for, and W."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hocket.core.op import MESSAGES, Kind, Op
from hocket.core.schedule import Schedule
from hocket.passes.segments import rewritten


def split_backward(schedule: Schedule) -> Schedule:
    r"""Return the same order with I and W for each B, W right after I.

    Messages that follow B follow I: the gradient that the device before waits for
    leaves before the weight gradient is computed.

        B SEND_B F   ─▶   I SEND_B W F

    >>> print(split_backward(Schedule.parse("d0  0F0 0F1 0B0 0B1 0U\nd1  1F0 1B0 1U")))
    d0  0F0 0F1 0I0 0W0 0I1 0W1 0U
    d1  1F0 1I0 1W0 1U
    """
    return rewritten(schedule, _split)


def _split(ops: Sequence[Op]) -> Iterator[Op]:
    waiting: list[Op] = []  # the W of a B, until its messages are posted
    for op in ops:
        if waiting and op.kind not in MESSAGES:
            yield waiting.pop()
        if op.kind is Kind.BACKWARD:
            yield op.as_kind(Kind.BACKWARD_INPUT)
            waiting.append(op.as_kind(Kind.BACKWARD_WEIGHT))
        else:
            yield op
    yield from waiting
