"""Divide what a device holds at its peak into parts."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from hocket.core.costs import Costs
from hocket.core.simulator.memory import (
    Times,
    activation_curves,
    gradient_curves,
)
from hocket.core.simulator.work import prepare
from hocket.core.timelines.timeline import Timeline

_NO_TIMES = np.zeros(0)


@dataclass(frozen=True, slots=True)
class PeakBytes:
    """The parts of one device's peak.

    Args:
        weight_bytes: one version of the weights, and buffers.
        gradient_bytes: the weights' gradients; none if the peak comes before the step's
            first backward has ended.
        optimizer_bytes: the optimizer's state, and averages.
        activation_bytes: what forwards left for their backwards, and what the op at
            work holds.
        message_bytes: what was received, or is to be read on the same device; and,
            where there are delays, older versions of the weights.
    """

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    message_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(getattr(self, part.name) for part in fields(self))


def peak_parts(timeline: Timeline, costs: Costs) -> tuple[PeakBytes, ...]:
    """Return the parts of each device's peak.

    Args:
        timeline: simulated or measured, with bytes over time.
        costs: the costs that it was simulated with.

    Raises:
        PlanError: the timeline does not know its bytes.
    """
    program = timeline.schedule.program
    stage_costs = costs.of(program)
    work = prepare(timeline.schedule, costs)
    start_s, end_s = map(np.concatenate, (timeline.start_s, timeline.end_s))
    times = Times(start_s, end_s, _NO_TIMES, _NO_TIMES)
    activations = activation_curves(work, costs, times)
    gradients = gradient_curves(work, costs, times)
    parts = []
    for device, own in enumerate(program.stages_on):
        peak = timeline.peak_bytes(device)
        curve = timeline.memory[device]
        time_s = float(curve.time_s[curve.amount.argmax()])
        weights = sum(stage_costs[stage].weight_bytes for stage in own)
        trained = [stage for stage in own if program.stages[stage].trainable]
        states = sum(stage_costs[stage].optimizer_bytes for stage in trained)
        alive = round(activations[device].at(time_s))
        grads = round(gradients[device].at(time_s))
        rest = round(peak) - weights - states - alive - grads
        parts.append(PeakBytes(weights, grads, states, alive, rest))
    return tuple(parts)
