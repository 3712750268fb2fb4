"""Merge each I and the W that follows it into one backward."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from hocket.core.op import MESSAGES, Kind, Op
from hocket.core.schedule import Schedule
from hocket.passes.segments import rewritten


def merge_backward(schedule: Schedule) -> Schedule:
    r"""Return the same order, with B for each I whose W follows at once.

    The inverse of `split_backward`. I and W with other work between them stay split;
    messages are no work. B takes a device less time than I and W, but the gradient that
    the device before waits for leaves later, by the time of W.

        I SEND_B W F   ─▶   B SEND_B F

    >>> print(merge_backward(Schedule.parse("d0  0F0 0F1 0I0 0W0 0I1 0F2 0W1 0U")))
    d0  0F0 0F1 0B0 0I1 0F2 0W1 0U
    """
    return rewritten(schedule, _merge)


def merge_unneeded_splits(schedule: Schedule) -> Schedule:
    r"""Merge I and W only where no other device waits for the I.

    That is in a net's first stage, and where the stage before is on the same device,
    which runs it after the W anyway. Such an order is never slower, however long its
    ops take, and B costs the host less than I and W.

    >>> print(merge_unneeded_splits(Schedule.parse(
    ...     "d0  0F0 0I0 0W0 0U\nd1  1F0 1I0 1W0 1U")))
    d0  0F0 0B0 0U
    d1  1F0 1I0 1W0 1U
    """
    program = schedule.program
    waited = {
        stage
        for stage, sources in enumerate(program.sources)
        for source in sources
        if program.stages[source].device != program.stages[stage].device
    }
    return rewritten(schedule, lambda ops: _merge(ops, waited))


def _merge(ops: Sequence[Op], kept: Collection[int] = ()) -> Iterator[Op]:
    """Merge I and W, except on the stages that are kept."""
    merged: set[Op] = set()  # the W that are a part of a B now
    for i, op in enumerate(ops):
        if (
            op.kind is Kind.BACKWARD_INPUT
            and op.stage not in kept
            and _next_work(ops, i) == _weight_of(op)
        ):
            merged.add(_weight_of(op))
            yield op.as_kind(Kind.BACKWARD)
        elif op not in merged:
            yield op


def _next_work(ops: Sequence[Op], position: int) -> Op | None:
    """Return the first op after a position that is no message."""
    others = (ops[i] for i in range(position + 1, len(ops)))
    return next((op for op in others if op.kind not in MESSAGES), None)


def _weight_of(op: Op) -> Op:
    return op.as_kind(Kind.BACKWARD_WEIGHT)
