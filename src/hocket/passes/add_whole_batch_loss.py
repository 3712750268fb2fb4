"""Compute the loss over the whole batch, behind all forwards and before all backwards.

d0  0F0 0F1 0B0 0B1 0U              d0  0F0 0F1 0B0 0B1 0U
d1      1F0 1F1 1B0 1B1 1U    ──▶   d1      1F0 1F1 1L 1B0 1B1 1U
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hocket.core.op import BACKWARDS, Kind, Op
from hocket.core.schedule import Schedule
from hocket.errors import ShapeError


def add_whole_batch_loss(schedule: Schedule) -> Schedule:
    r"""Return the same order with op L in place of losses of single microbatches.

    All microbatches of the last stage are alive when the loss is computed. With
    replicas, each gathers the outputs of all (op G) first.

    Args:
        schedule: an order of one net and one step, without messages.

    Raises:
        ShapeError: it has a backward of the last stage before one of its forwards, or
            several steps.

    >>> print(add_whole_batch_loss(Schedule.parse("d0  0F0 0F1 0B0 0B1 0U")))
    d0  0F0 0F1 0L 0B0 0B1 0U
    """
    program = schedule.program
    if program.num_steps != 1 or len(program.nets) != 1:
        raise ShapeError("a loss over the whole batch needs an order of a single step")
    gathers = program.num_pipelines > 1
    (net,) = program.nets
    net = replace(net, batch_loss=True, loss_over_replicas=gathers)
    program = replace(program, nets=(net,))
    lanes = []
    for lane in schedule.lanes:
        ops = lane.ops
        for stage in sorted(program.loss_stages):
            ops = _with_loss(ops, stage, gathers=gathers)
        lanes.append(replace(lane, ops=ops))
    return Schedule(program, tuple(lanes))


def _with_loss(ops: Sequence[Op], stage: int, *, gathers: bool) -> tuple[Op, ...]:
    """Return a lane's ops with the loss of a stage, if the stage is in the lane."""
    forwards = [
        i for i, op in enumerate(ops) if op.stage == stage and op.kind is Kind.FORWARD
    ]
    if not forwards:
        return tuple(ops)
    end = forwards[-1] + 1
    early = [op for op in ops[:end] if op.stage == stage and op.kind in BACKWARDS]
    if early:
        raise ShapeError(
            f"{early[0]} comes before {ops[end - 1]}: a loss over the whole batch "
            "needs all forwards of the last stage before its first backward"
        )
    kinds = [Kind.GATHER, Kind.LOSS] if gathers else [Kind.LOSS]
    return (*ops[:end], *(Op(kind, stage, None) for kind in kinds), *ops[end:])
