"""Keep memory over time, and what was sent: steps of a curve, and columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from hocket.core.op import Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.timelines.arrays import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class MemoryCurve:
    """A quantity that changes at some instants and stays between them.

    Args:
        time_s: when it changes, ascending.
        amount: how much there is from then on; units or bytes.
    """

    time_s: Floats
    amount: Floats

    @property
    def peak(self) -> float:
        """The most there is at any time."""
        return float(self.amount.max()) if self.amount.size else 0.0

    def at(self, time_s: float) -> float:
        """Return the amount at an instant, after the changes of that instant."""
        place = int(np.searchsorted(self.time_s, time_s, side="right"))
        return float(self.amount[place - 1]) if place else 0.0

    @classmethod
    def of_changes(
        cls, time_s: Floats, change: Floats, start: float = 0.0
    ) -> MemoryCurve:
        """Add up changes; at one instant, frees come before allocations.

        Args:
            time_s: when something changes, in any order.
            change: by how much, more or less than 0.
            start: how much there is before.
        """
        order = np.lexsort((change, time_s))
        times = np.concatenate(([0.0], time_s[order]))
        amounts = start + np.concatenate(([0.0], np.cumsum(change[order])))
        return cls(times, amounts)


def activation_units(
    schedule: Schedule,
    start_s: Sequence[Floats],
    end_s: Sequence[Floats],
    device: int,
    last: frozenset[Kind],
) -> MemoryCurve:
    """Return the activation units alive on a device over time.

    A microbatch counts in a stage from the start of its F to the end of its `last` op,
    as one part in as many as the device has trainable stages. Forwards of a stage
    without backwards, such as a teacher's, leave nothing; in evaluation, where no stage
    of the device has backwards, a microbatch counts while its F runs.

    Args:
        schedule: what was done.
        start_s: the start of each op of each lane.
        end_s: the end of each op of each lane.
        device: the device.
        last: the kinds that end it: B or I, or B or W (`MAKES_WEIGHT_GRAD`).
    """
    program = schedule.program
    own = program.stages_on[device]
    trained = [stage for stage in own if program.stages[stage].trainable]
    times: list[float] = []
    changes: list[int] = []
    for i in schedule.lanes_of(device):
        starts, ends = start_s[i], end_s[i]
        for j, op in enumerate(schedule.lanes[i].ops):
            if trained and op.stage not in trained:
                continue
            if op.kind is Kind.FORWARD:
                times.append(starts[j])
                changes.append(1)
                if not trained:
                    times.append(ends[j])
                    changes.append(-1)
            elif op.kind in last:
                times.append(ends[j])
                changes.append(-1)
    count = MemoryCurve.of_changes(np.array(times, float), np.array(changes, float))
    parts = max(1, len(trained or own))
    return MemoryCurve(count.time_s, count.amount / parts)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message between devices, or one reduction (from a device to itself)."""

    op: Op  # the op that made what is sent, or the reduction
    from_device: int
    to_device: int
    start_s: float
    end_s: float
    num_bytes: int


def _ints() -> Ints:
    return np.zeros(0, np.int64)


def _floats() -> Floats:
    return np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Every transfer of a timeline, one row each, in order of start.

    Args:
        lane: the lane of the op that made what is sent, or of the reduction.
        position: the place of that op in its lane.
        from_device: where it comes from.
        to_device: where it goes; a reduction stays on its device.
        start_s: when it begins to occupy the link.
        end_s: when it is usable at the other end.
        num_bytes: its size; of a reduction, the size of what is reduced.
    """

    lane: Ints = field(default_factory=_ints)
    position: Ints = field(default_factory=_ints)
    from_device: Ints = field(default_factory=_ints)
    to_device: Ints = field(default_factory=_ints)
    start_s: Floats = field(default_factory=_floats)
    end_s: Floats = field(default_factory=_floats)
    num_bytes: Ints = field(default_factory=_ints)

    def taken(self, rows: Ints) -> Traffic:
        """Return a selection of the transfers, in the order given."""
        return Traffic(*(getattr(self, column.name)[rows] for column in fields(self)))
