"""Find the costs that explain measured steps, so that a simulation repeats them.

Between two ops of a lane:

    not waited      op ├─ sends ─┼─ host ─┼─ reads ─┤ op         handling, op_s
    waited          op ├─ sends ─┼────────── on the way ──────────┼─ reads ─┤ op
                    └ of the other lane            latency        of this lane

Gaps in which a lane did not wait show what a message costs the lanes themselves; with
that known, gaps in which it waited show what a message costs on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from hocket.core.costs import MAX_JITTER, Costs, StageCost
from hocket.core.op import WHOLE_OR_SPLIT_BACKWARD, Kind
from hocket.core.simulator.needs import LOCAL, UNREAD
from hocket.core.simulator.work import Work, prepare
from hocket.core.timelines.arrays import Floats, Ints
from hocket.core.timelines.timeline import Timeline

_QUARTILES: Final = 1.349  # how many standard deviations lie between them
_EARLY_S: Final = 200e-6  # made so long before it was read, no lane waited for it
_MANY: Final = 0.1  # of all gaps
_USUAL: Final = 0.95  # of all gaps; the longest are another program's doing


def fit(
    costs: Costs, steps: Sequence[Timeline], counted: Sequence[slice] | None = None
) -> Costs:
    """Return the costs, corrected by what was measured.

    Seconds of ops are the mean over a step's ops of one kind and stage, of the median
    step. The proportion of I and W in a backward is kept unless it was measured, and so
    is the dependence of a message's costs on its bytes.

    Args:
        costs: complete costs from another source.
        steps: measured steps, all of one schedule.
        counted: the ops of each lane whose seconds count, among them all kinds of all
            stages; all ops when not given.
    """
    work = prepare(steps[0].schedule, costs)
    start_s = np.stack([np.concatenate(step.start_s) for step in steps])
    end_s = np.stack([np.concatenate(step.end_s) for step in steps])
    spent_s = end_s - start_s
    rows = _rows(work, counted or [slice(None)] * len(work.schedule.lanes))
    means: dict[int, dict[Kind, float]] = {}
    for (stage, kind), of in rows.items():
        mean_s = float(np.median(spent_s[:, of].mean(1)))
        means.setdefault(stage, {})[kind] = mean_s
    gaps = _Gaps.of(work, start_s, end_s)
    op_s, handling_s = _own(gaps, costs)
    latency_s = _on_the_way(gaps, costs, op_s, handling_s)
    return replace(
        costs,
        stages=tuple(
            _stage(cost, means.get(i, {})) for i, cost in enumerate(costs.stages)
        ),
        op_s=op_s,
        handling=replace(costs.handling, latency_s=handling_s),
        link=replace(costs.link, latency_s=latency_s),
        jitter=float(np.mean([_jitter(spent_s[:, of]) for of in rows.values()])),
    )


def _rows(work: Work, counted: Sequence[slice]) -> dict[tuple[int, Kind], Ints]:
    """Return the ops of each stage and kind that count."""
    rows: dict[tuple[int, Kind], list[int]] = {}
    first = 0
    for lane, of in zip(work.schedule.lanes, counted, strict=True):
        for i in range(len(lane.ops))[of]:
            op = lane.ops[i]
            rows.setdefault((op.stage, op.kind), []).append(first + i)
        first += len(lane.ops)
    return {key: np.array(of) for key, of in rows.items()}


@dataclass(frozen=True, slots=True, eq=False)
class _Gaps:
    """What lay between the ops of lanes, flat over all steps.

    Args:
        gap_s: the time between an op and the one before on its lane, if it did not
            wait.
        num: the messages that the lane handled in it.
        num_bytes: the bytes of those messages.
        way_s: the time from the end of the op that made a value to its reader's start.
        way_bytes: the bytes of that message.
        late_s: how much later than the op before on the reader's lane that one ended;
            minus infinity for a lane's first op.
        num_sent: the messages that the reader's lane had to send first.
        bytes_sent: the bytes of those messages.
    """

    gap_s: Floats
    num: Ints
    num_bytes: Ints
    way_s: Floats
    way_bytes: Ints
    late_s: Floats
    num_sent: Ints
    bytes_sent: Ints

    @classmethod
    def of(cls, work: Work, start_s: Floats, end_s: Floats) -> _Gaps:
        num_ops, needs, messages = work.columns.num_ops, work.needs, work.messages
        # 1. The messages that each op reads, and what the op before it has sent.
        is_read = messages.arrival != UNREAD
        bytes_of = np.zeros(needs.arrivals.maker.size)
        bytes_of[messages.arrival[is_read]] = messages.num_bytes[is_read]
        remote = np.flatnonzero(needs.arrival != LOCAL)
        reader, arrived = needs.row[remote], bytes_of[needs.arrival[remote]]
        maker = np.full(num_ops, -1)  # of what it reads from another device, if it does
        maker[reader] = needs.maker[remote]
        num_read = np.bincount(reader, minlength=num_ops)
        bytes_read = np.bincount(reader, arrived, minlength=num_ops)
        sent = messages.maker
        num_sent = np.roll(np.bincount(sent, minlength=num_ops), 1)
        bytes_sent = np.bincount(sent, messages.num_bytes, minlength=num_ops)
        bytes_sent = np.roll(bytes_sent, 1)

        # 2. The times between them.
        follows = np.ones(num_ops, bool)  # another op of its lane
        follows[[row for row in work.columns.first if row < num_ops]] = False
        before_s = np.roll(end_s, 1, axis=1)
        made_s = np.where(maker >= 0, end_s[:, maker], -np.inf)
        free = follows & (before_s - made_s > _EARLY_S)
        reads = np.broadcast_to(num_read == 1, start_s.shape)
        late_s = np.where(follows, made_s - before_s, -np.inf)
        ops = np.broadcast_to(np.arange(num_ops), start_s.shape)
        return cls(
            (start_s - before_s)[free],
            (num_read + num_sent)[ops[free]],
            (bytes_read + bytes_sent)[ops[free]],
            (start_s - made_s)[reads],
            bytes_read[ops[reads]],
            late_s[reads],
            num_sent[ops[reads]],
            bytes_sent[ops[reads]],
        )


def _own(gaps: _Gaps, costs: Costs) -> tuple[float, float]:
    """Return what lanes spend on an op, and on a message."""
    handles = gaps.num > 0
    # If nearly every op has a message, the two cannot be distinguished, nor need be:
    # the few without one lie between the last forward and the first backward.
    knows = np.mean(~handles) > _MANY if handles.size else False
    op_s = _usual(gaps.gap_s[~handles]) if knows else costs.op_s
    if not handles.any():
        return op_s, costs.handling.latency_s
    rest_s = gaps.gap_s - op_s - gaps.num_bytes / costs.handling.bytes_per_s
    return op_s, max(0.0, _usual(rest_s[handles] / gaps.num[handles]))


def _on_the_way(gaps: _Gaps, costs: Costs, op_s: float, handling_s: float) -> float:
    own_s_per_byte = 1 / costs.handling.bytes_per_s
    s_per_byte = 2 * own_s_per_byte + 1 / costs.link.bytes_per_s
    way_s = gaps.way_s - gaps.way_bytes * s_per_byte - 2 * handling_s
    # It was waited for if it was sent off after the lane had done all else.
    sends_s = gaps.num_sent * handling_s + gaps.bytes_sent * own_s_per_byte
    sent_s = gaps.late_s + handling_s + gaps.way_bytes * own_s_per_byte
    waited = sent_s > sends_s + op_s
    if waited.any():
        return max(0.0, _usual(way_s[waited]))
    # What was there in time took no longer than that.
    return max(0.0, float(way_s.min(initial=costs.link.latency_s)))


def _usual(values: Floats) -> float:
    """Return the mean of all but the longest."""
    return float(values[values <= np.quantile(values, _USUAL)].mean())


def _jitter(spent_s: Floats) -> float:
    """Estimate standard deviation over mean from the quartiles, without outliers."""
    low, middle, high = np.quantile(spent_s, (0.25, 0.5, 0.75))
    if middle <= 0:
        return 0.0
    return min(MAX_JITTER, float((high - low) / middle) / _QUARTILES)


def _stage(cost: StageCost, own: Mapping[Kind, float]) -> StageCost:
    """Return one stage's cost, as far as its ops were measured.

    Only an order with B, I and W shows how much longer I and W take than B. If the
    order has only one form of the backward, the ratio stays as in the cost given.
    """
    cost = replace(
        cost,
        forward_s=own.get(Kind.FORWARD, cost.forward_s),
        update_s=own.get(Kind.UPDATE, cost.update_s),
    )
    if own.keys().isdisjoint(WHOLE_OR_SPLIT_BACKWARD):
        return cost
    again_s = cost.recompute_s  # in B, or in I
    input_s = own.get(Kind.BACKWARD_INPUT, cost.seconds(Kind.BACKWARD_INPUT)) - again_s
    weight_s = own.get(Kind.BACKWARD_WEIGHT, cost.seconds(Kind.BACKWARD_WEIGHT))
    apart_s = max(0.0, input_s) + weight_s
    share = max(0.0, input_s) / apart_s if apart_s else 1.0
    believed_s = cost.input_grad_s + cost.weight_grad_s
    longer = 1.0 + cost.split_s / believed_s if believed_s else 1.0
    whole_s = apart_s / longer
    if Kind.BACKWARD in own:
        whole_s = max(0.0, own[Kind.BACKWARD] - again_s)
        if Kind.BACKWARD_INPUT not in own:
            apart_s = whole_s * longer
    return replace(
        cost,
        input_grad_s=whole_s * share,
        weight_grad_s=whole_s - whole_s * share,
        split_s=apart_s - whole_s,
    )
