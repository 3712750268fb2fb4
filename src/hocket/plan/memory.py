"""Memory over time: steps of a curve, in activation units or in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hocket.plan.op import BACKWARDS, Kind

if TYPE_CHECKING:
    from hocket.plan.timeline import Timeline


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """A quantity that changes at some instants and stays between them.

    Args:
        time_s: when it changes, ascending.
        amount: how much there is from then on; units or bytes.
    """

    time_s: NDArray[np.float64]
    amount: NDArray[np.float64]

    @property
    def peak(self) -> float:
        """The most there is at any time."""
        return float(self.amount.max()) if self.amount.size else 0.0

    @classmethod
    def of_changes(
        cls, time_s: NDArray[np.float64], change: NDArray[np.float64], start: float = 0.0
    ) -> MemoryCurve:
        """Add up changes; at one instant, what is freed goes before what is taken."""
        order = np.lexsort((change, time_s))
        times = np.concatenate(([0.0], time_s[order]))
        amounts = start + np.concatenate(([0.0], np.cumsum(change[order])))
        return cls(times, amounts)


def activation_units(timeline: Timeline, device: int) -> MemoryCurve:
    """Activation units alive on a device over time.

    A microbatch counts in a stage from the start of its F to the end of its B or I,
    as one part in as many as the device has stages. Where a stage has no backward, it
    counts while its F runs.
    """
    schedule = timeline.schedule
    program = schedule.program
    unit = 1.0 / max(1, len(program.stages_on[device]))
    times, changes = [], []
    for i in schedule.lanes_of(device):
        starts, ends = timeline.start_s[i], timeline.end_s[i]
        for j, op in enumerate(schedule.lanes[i].ops):
            if op.kind is Kind.FORWARD:
                times.append(starts[j])
                changes.append(unit)
                if not program.stages[op.stage].trainable:
                    times.append(ends[j])
                    changes.append(-unit)
            elif op.kind in BACKWARDS:
                times.append(ends[j])
                changes.append(-unit)
    return MemoryCurve.of_changes(np.array(times, float), np.array(changes, float))
