"""Keep ops as columns of numbers, so that a million of them are handled at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter
from typing import Final

import numpy as np

from hocket.core.op import RECEIVES, Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.timelines.arrays import Bools, Ints
from hocket.errors import ScheduleError

KINDS: Final = tuple(Kind)
HINT: Final = " (`check` finds all that is wrong with a schedule)"
NONE: Final = -(2**63)  # no op has this number
CODES: Final = {kind: code for code, kind in enumerate(KINDS)}


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Every op of a schedule, lane after lane; op `i` is row `i` of each column.

    Args:
        kind: the op's place in `KINDS`.
        stage: as in the op.
        microbatch: 0 where the op has none.
        step: as in the op.
        peer: the stage at the other end of a message, and -1 for all other ops.
        lane: which lane the op is on.
        device: which device that lane is on.
        first: the first row of each lane and, at the end, the number of ops.
    """

    kind: Ints
    stage: Ints
    microbatch: Ints
    step: Ints
    peer: Ints
    lane: Ints
    device: Ints
    first: tuple[int, ...]

    @property
    def num_ops(self) -> int:
        """How many ops there are on all lanes together."""
        return self.first[-1]

    def is_any(self, kinds: frozenset[Kind]) -> Bools:
        """Return which ops are of one of these kinds."""
        table = np.array([kind in kinds for kind in KINDS])
        return table[self.kind]

    def describe(self, row: int, schedule: Schedule) -> str:
        """Name an op and where it is, as errors do."""
        label = schedule.lanes[int(self.lane[row])].label
        return f"{self.op(row, schedule)} on lane {label}"

    def op(self, row: int, schedule: Schedule) -> Op:
        """Return the op in a row."""
        lane = int(self.lane[row])
        return schedule.lanes[lane].ops[row - self.first[lane]]

    @classmethod
    def of(cls, schedule: Schedule) -> Columns:
        """Read the ops of a schedule.

        Raises:
            ScheduleError: an op is not of the program, or on another device than its
                stage. Whether ops are missing is not looked at.
        """
        read = cls.read(schedule)
        microbatch = np.where(read.microbatch == NONE, 0, read.microbatch)
        peer = np.where(read.peer == NONE, -1, read.peer)
        columns = replace(read, microbatch=microbatch, peer=peer)
        faults = tuple(_faults(columns, schedule))
        if faults:
            raise ScheduleError(faults)
        return columns

    @classmethod
    def read(cls, schedule: Schedule) -> Columns:
        """Read any ops; a microbatch or peer that an op does not have is NONE.

        Raises:
            OverflowError: a number does not fit in a column.
        """
        ops = [op for lane in schedule.lanes for op in lane.ops]

        def column(number_of: Callable[[Op], int | None]) -> Ints:
            numbers = map(number_of, ops)
            given = (NONE if number is None else number for number in numbers)
            return np.fromiter(given, np.int64, len(ops))

        sizes = [len(lane.ops) for lane in schedule.lanes]
        lane = np.repeat(np.arange(len(sizes)), sizes)
        devices = np.array([facts.device for facts in schedule.lanes], np.int64)
        return cls(
            column(lambda op: CODES[op.kind]),
            column(attrgetter("stage")),
            column(attrgetter("microbatch")),
            column(attrgetter("step")),
            column(attrgetter("peer")),
            lane,
            devices[lane],
            (0, *accumulate(sizes)),
        )


def _faults(columns: Columns, schedule: Schedule) -> Iterator[str]:
    """Find the first op out of the program's numbers, and the first misplaced one."""
    program = schedule.program
    stages = range(program.num_stages)
    num_microbatches = np.array([program.num_microbatches_of(s) for s in stages])
    home = np.array([stage.device for stage in program.stages])
    known = np.clip(columns.stage, 0, program.num_stages - 1)
    outside = (
        (columns.stage != known)
        | (columns.peer >= program.num_stages)
        | (columns.step >= program.num_steps)
    )
    # A message carries a microbatch of the stage that it comes from.
    is_received = columns.is_any(RECEIVES)
    owner = np.where(is_received & ~outside, columns.peer, known)
    outside |= columns.microbatch >= num_microbatches[owner]
    misplaced = ~outside & (home[known] != columns.device)
    for wrong, what in (
        (outside, "is no op of this program"),
        (misplaced, "is not on the device of its stage"),
    ):
        for row in np.flatnonzero(wrong)[:1].tolist():
            yield f"{columns.describe(row, schedule)} {what}{HINT}"
