"""Keep ops as columns of numbers, so that a million of them are handled at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter
from typing import Final

import numpy as np

from hocket.core.dataflow import PER_MICROBATCH, Fact, Rule, Value, most_gathers
from hocket.core.op import RECEIVES, SHARDING, Kind, Op
from hocket.core.program import Program
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
        schedule: the schedule.
        kind: the op's place in `KINDS`.
        stage: as in the op.
        microbatch: 0 where the op has none.
        step: as in the op.
        peer: the stage at the other end of a message, and -1 for all other ops.
        lane: which lane the op is on.
        device: which device that lane is on.
        first: the first row of each lane and, at the end, the number of ops.
    """

    schedule: Schedule
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

    def describe(self, row: int) -> str:
        """Name an op and where it is, as errors do."""
        label = self.schedule.lanes[int(self.lane[row])].label
        return f"{self.op(row)} on lane {label}"

    def op(self, row: int) -> Op:
        """Return the op in a row."""
        lane = int(self.lane[row])
        return self.schedule.lanes[lane].ops[row - self.first[lane]]

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
        faults = tuple(_faults(columns))
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
            schedule,
            column(lambda op: CODES[op.kind]),
            column(attrgetter("stage")),
            column(attrgetter("microbatch")),
            column(attrgetter("step")),
            column(attrgetter("peer")),
            lane,
            devices[lane],
            (0, *accumulate(sizes)),
        )


def _faults(columns: Columns) -> Iterator[str]:
    """Find the first op out of the program's numbers, and the first misplaced one."""
    program = columns.schedule.program
    stages = range(program.num_stages)
    num_microbatches = np.array([program.num_microbatches_of(s) for s in stages])
    num_gathers = np.array([most_gathers(s, program) for s in stages])
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
    most = np.where(
        columns.is_any(SHARDING), num_gathers[owner], num_microbatches[owner]
    )
    outside |= columns.microbatch >= most
    misplaced = ~outside & (home[known] != columns.device)
    for wrong, what in (
        (outside, "is no op of this program"),
        (misplaced, "is not on the device of its stage"),
    ):
        for row in np.flatnonzero(wrong)[:1].tolist():
            yield f"{columns.describe(row)} {what}{HINT}"


# Apply the rules of dataflow to every op of a schedule at once.

FACTS: Final = tuple(Fact)
_CODES: Final = {fact: code for code, fact in enumerate(FACTS)}
_IS_PER_MICROBATCH: Final = np.array([fact in PER_MICROBATCH for fact in FACTS])


@dataclass(frozen=True, slots=True)
class ValueNumbers:
    """Numbers the values of a program.

    A value has the number
    `((fact * stages + stage) * steps + step) * microbatches + microbatch`.

    Args:
        num_stages: the stages of the program.
        num_steps: one more than the program has, because WEIGHTS count updates.
        num_microbatches: the most that any net has, or gathers that a stage may have.
    """

    num_stages: int
    num_steps: int
    num_microbatches: int

    @classmethod
    def of(cls, program: Program) -> ValueNumbers:
        """Make room for every value of a program."""
        most = max(net.num_microbatches for net in program.nets)
        stages = range(program.num_stages)
        most = max(most, *(most_gathers(stage, program) for stage in stages))
        return cls(program.num_stages, program.num_steps + 1, most)

    @property
    def size(self) -> int:
        """One more than the greatest number."""
        return len(FACTS) * self.num_stages * self.num_steps * self.num_microbatches

    def number(self, fact: Ints, stage: Ints, step: Ints, microbatch: Ints) -> Ints:
        """Return the numbers of values given as columns; facts by place in `FACTS`."""
        of_stage = (fact * self.num_stages + stage) * self.num_steps + step
        return of_stage * self.num_microbatches + microbatch

    def fact_and_stage(self, number: Ints) -> tuple[Ints, Ints]:
        """Return the fact and the stage of values given by their numbers."""
        return np.divmod(
            number // (self.num_steps * self.num_microbatches), self.num_stages
        )

    def value(self, number: int) -> Value:
        """Return the value that has a number."""
        rest, microbatch = divmod(int(number), self.num_microbatches)
        rest, step = divmod(rest, self.num_steps)
        code, stage = divmod(rest, self.num_stages)
        fact = FACTS[code]
        return Value(fact, stage, microbatch if fact in PER_MICROBATCH else None, step)


RulesOf = Callable[[Kind, int], tuple[Rule, ...]]


def fill(columns: Columns, program: Program, rules_of: RulesOf) -> tuple[Ints, Ints]:
    """Return every value that every op needs, or makes, by the given rules.

    Args:
        columns: the ops.
        program: the program of the ops.
        rules_of: the rules of a kind and stage, `need_rules` or `make_rules`.

    Returns:
        The rows of the ops, ascending, each as often as it has values; and the number
        of one of its values, in the order of the rules.
    """
    # 1. The rules of every kind and stage that occurs, one after another.
    key = columns.kind * program.num_stages + columns.stage
    num_rules = np.zeros(len(KINDS) * program.num_stages, np.int64)
    first_rule = np.zeros_like(num_rules)
    rules: list[Rule] = []
    for present in np.flatnonzero(np.bincount(key, minlength=num_rules.size)):
        code, stage = divmod(int(present), program.num_stages)
        found = rules_of(KINDS[code], stage)
        num_rules[present], first_rule[present] = len(found), len(rules)
        rules += found
    fact = np.array([_CODES[rule.fact] for rule in rules], np.int64)
    owner = np.array([rule.stage for rule in rules], np.int64)
    shift = np.array([rule.shift for rule in rules], np.int64)
    num_read = np.array([rule.num_read for rule in rules], np.int64)
    num_readers = np.array([rule.num_readers for rule in rules], np.int64)

    # 2. One entry for each rule of each op; then one for each value of each entry.
    row, place = repeat(num_rules[key])
    rule = first_rule[key[row]] + place
    entry, place = repeat(np.where(_IS_PER_MICROBATCH[fact], num_read, 1)[rule])
    row, rule = row[entry], rule[entry]
    first = np.maximum(0, columns.microbatch[row]) // num_readers[rule]
    microbatch = first * num_read[rule] + place

    # 3. Their numbers.
    return row, ValueNumbers.of(program).number(
        fact[rule],
        owner[rule],
        np.maximum(0, columns.step[row] + shift[rule]),
        microbatch * _IS_PER_MICROBATCH[fact[rule]],
    )


def repeat(counts: Ints) -> tuple[Ints, Ints]:
    """Repeat each index as often as `counts` says, and number its repetitions.

    >>> repeat(np.array([2, 0, 3]))
    (array([0, 0, 2, 2, 2]), array([0, 1, 0, 1, 2]))
    """
    index = np.repeat(np.arange(counts.size), counts)
    before = np.cumsum(counts) - counts
    return index, np.arange(index.size) - before[index]
