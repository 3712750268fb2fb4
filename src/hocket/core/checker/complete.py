"""Decide for all ops at once whether a schedule has the right ones, each once.

Each microbatch of each stage and step has a number, by which ops are counted:

    stage 0, step 0    step 1    stage 1, step 0
    0 1                2 3       4 5                with 2 microbatches and 2 steps

`faults` names what is wrong, op by op.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.core.dataflow import once_per_step
from hocket.core.op import MESSAGES, ONCE_PER_STEP, RECEIVES, SENDS, Kind
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.simulator.columns import CODES, NONE, Columns
from hocket.core.timelines.arrays import Bools, Ints

_FORWARD_MESSAGES = frozenset({Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD})


def is_complete(schedule: Schedule) -> bool:
    """Return whether a schedule has all ops of its program, each once, and no others.

    Args:
        schedule: any schedule; nothing about it is assumed.
    """
    streams = [(lane.device, lane.stream) for lane in schedule.lanes]
    try:
        columns = Columns.read(schedule)
    except OverflowError:  # a number that is too large for any program
        return False
    program = schedule.program
    return (
        len(set(streams)) == len(streams)
        and _are_of_program(columns, program)
        and _are_due(columns, program)
        and _have_two_ends(columns, program)
    )


def _are_of_program(columns: Columns, program: Program) -> bool:
    """Return whether the program has the numbers of all ops, on their devices."""
    home = np.array([stage.device for stage in program.stages])
    num_stages, num_microbatches = program.num_stages, _num_microbatches(program)
    stage = np.clip(columns.stage, 0, num_stages - 1)
    peer = np.clip(columns.peer, 0, num_stages - 1)
    owner = np.where(columns.is_any(RECEIVES), peer, stage)
    expected = (
        columns.stage == stage,
        columns.peer == np.where(columns.is_any(MESSAGES), peer, NONE),
        columns.device == home[stage],
        (columns.step >= 0) & (columns.step < program.num_steps),
        (columns.microbatch == NONE) == columns.is_any(ONCE_PER_STEP),
        (columns.microbatch >= 0) | columns.is_any(ONCE_PER_STEP),
        columns.microbatch < num_microbatches[owner],
    )
    return all(bool(each.all()) for each in expected)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Numbers the microbatches of a program.

    Args:
        first: the number of each stage's first microbatch.
        num_microbatches: how many each stage has in one step.
        size: one more than the greatest number.
    """

    first: Ints
    num_microbatches: Ints
    size: int

    @classmethod
    def of(cls, program: Program) -> _Numbers:
        """Give each microbatch of each stage and step a number."""
        num_microbatches = _num_microbatches(program)
        ends = np.cumsum(num_microbatches * program.num_steps)
        return cls(np.concatenate(([0], ends[:-1])), num_microbatches, int(ends[-1]))

    def number(self, stage: Ints, step: Ints, microbatch: Ints) -> Ints:
        """Return the numbers of microbatches that are given as columns."""
        return self.first[stage] + step * self.num_microbatches[stage] + microbatch


def _are_due(columns: Columns, program: Program) -> bool:
    """Return whether the compute, the reductions and the updates are those wanted."""
    numbers = _Numbers.of(program)
    number = numbers.number(
        columns.stage, columns.step, np.maximum(0, columns.microbatch)
    )

    def count(kind: Kind) -> Ints:
        found = number[columns.kind == CODES[kind]]
        return np.bincount(found, minlength=numbers.size)

    trainable = np.array([stage.trainable for stage in program.stages])
    trained = np.repeat(trainable, numbers.num_microbatches * program.num_steps)
    num_input_grads = count(Kind.BACKWARD_INPUT)
    expected = (
        count(Kind.FORWARD) == 1,
        count(Kind.BACKWARD) + num_input_grads == trained,
        count(Kind.BACKWARD_WEIGHT) == num_input_grads,
        *(count(kind) == _due(kind, numbers, program) for kind in ONCE_PER_STEP),
    )
    return all(bool(each.all()) for each in expected)


def _due(kind: Kind, numbers: _Numbers, program: Program) -> Bools:
    """Return where an op of a kind is due once per step: at the first microbatch."""
    due = np.zeros(numbers.size, bool)
    steps = np.arange(program.num_steps)
    for stage in range(program.num_stages):
        if kind in once_per_step(stage, program):
            due[numbers.number(stage + 0 * steps, steps, 0 * steps)] = True
    return due


def _have_two_ends(columns: Columns, program: Program) -> bool:
    """Return whether each SEND has its RECV, each is there once, along a flow."""
    is_message = columns.is_any(MESSAGES)
    if not is_message.any():
        return True
    is_send, is_forward = columns.is_any(SENDS), columns.is_any(_FORWARD_MESSAGES)
    ends = columns.stage, columns.peer
    source, target = np.where(is_send == is_forward, ends, ends[::-1])
    flow = source * program.num_stages + target
    flows = np.array([a * program.num_stages + b for a, b in program.flows], np.int64)
    most = int(_num_microbatches(program).max())
    key = (flow * 2 + is_forward) * program.num_steps + columns.step
    key = key * most + columns.microbatch
    sent, received = (np.sort(key[ops]) for ops in (is_send, is_message & ~is_send))
    return (
        bool(np.isin(flow[is_message], flows).all())
        and bool((np.diff(sent) > 0).all())
        and np.array_equal(sent, received)
    )


def _num_microbatches(program: Program) -> Ints:
    stages = range(program.num_stages)
    return np.array([program.num_microbatches_of(stage) for stage in stages])
