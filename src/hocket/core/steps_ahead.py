"""Repeat the order of a step in which some ops are of later batches.

one step      d0  S S t@1 B B U           t@1 works for the batch of the next step

prologue      d0  t                       the same without batches that are not there
body              S S t@1 B B U
epilogue          S@1 S@1 B@1 B@1 U@1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hocket.core.op import Op
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule


def repeat_ahead(program: Program, lanes: Sequence[Lane]) -> Schedule:
    """Return the order of all steps, with a body unless there are too few of them.

    Args:
        program: with as many steps as the order shall have.
        lanes: the order of one step, whose number is 0. The step of an op says how many
            batches it is ahead.
    """
    num_ahead = max((op.step for lane in lanes for op in lane.ops), default=0)
    if not num_ahead:
        one_step = Schedule(replace(program, num_steps=1), tuple(lanes))
        return one_step.with_num_steps(program.num_steps)
    num_repeats = max(0, program.num_steps - num_ahead)
    repeated, body = [], []
    for lane in lanes:
        begin = sum(op.step for op in lane.ops)  # once for each step that is ahead
        ops = tuple(
            Op(op.kind, op.stage, op.microbatch, op.step + step)
            for step in range(-num_ahead, program.num_steps)
            for op in lane.ops
            if 0 <= op.step + step < program.num_steps
        )
        repeated.append(Lane(lane.device, lane.stream, ops))
        body.append((begin, begin + num_repeats * len(lane.ops)))
    if not num_repeats:
        return Schedule(program, tuple(repeated))
    return Schedule(program, tuple(repeated), tuple(body), num_repeats)
