"""Bytes over time on each device, from when everything happened.

What is counted, of each stage, and for how long:

    one version of the weights           always
    gradients, optimizer state           always, where the stage is trained
    an older version of the weights      from the U that would overwrite it until the
                                         last op that reads it has ended
    activation_bytes                     F ├──────────┤ B      forward only: F ├─┤
      with the backward split            F ├──────────┤ I
      weight_grad_held_bytes of it       F ├─────────────────┤ W
    the output, where only forward runs  from the end of F until it is sent and read
    a received message                   from when it is on its way (or the RECV is
                                         posted) until the last op that needs it ended
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hocket.plan.arrays import Floats, Ints
from hocket.plan.costs import Costs, StageCost
from hocket.plan.dataflow import Fact
from hocket.plan.memory import MemoryCurve
from hocket.plan.op import Kind
from hocket.plan.program import Program
from hocket.plan.simulator.columns import CODES, Columns
from hocket.plan.simulator.messages import NO_OP
from hocket.plan.simulator.needs import LOCAL
from hocket.plan.simulator.values import FACTS, ValueNumbers
from hocket.plan.simulator.work import Work


class Times(NamedTuple):
    """Start and end of each op, and of each message."""

    start_s: Floats
    end_s: Floats
    sent_s: Floats
    arrived_s: Floats


class _Changes(NamedTuple):
    """Bytes taken (more than 0) and given back (less), many times over."""

    device: Ints
    time_s: Floats
    num_bytes: Floats


def memory_curves(work: Work, costs: Costs, times: Times) -> tuple[MemoryCurve, ...]:
    """Bytes alive over time, a curve per device."""
    program = work.schedule.program
    stage_costs = costs.of(program)
    changes = (
        *_activations(work, stage_costs, times),
        *_old_weights(work, stage_costs, times),
        *_outputs(work, stage_costs, times),
        *_received(work, times),
    )
    device, time_s, num_bytes = (np.concatenate(c) for c in zip(*changes, strict=True))
    kept = np.flatnonzero(num_bytes)
    kept = kept[np.argsort(device[kept], kind="stable")]
    bounds = np.searchsorted(device[kept], np.arange(1, program.num_devices))
    return tuple(
        MemoryCurve.of_changes(time_s[of_one], num_bytes[of_one], start)
        for of_one, start in zip(
            np.split(kept, bounds), _always(program, stage_costs), strict=True
        )
    )


def _always(program: Program, costs: Sequence[StageCost]) -> list[float]:
    """What is there on each device whatever happens."""
    num_bytes = [0.0] * program.num_devices
    for stage, cost in zip(program.stages, costs, strict=True):
        num_bytes[stage.device] += cost.weight_bytes
        if stage.trainable:
            num_bytes[stage.device] += cost.gradient_bytes + cost.optimizer_bytes
    return num_bytes


def _activations(
    work: Work, costs: Sequence[StageCost], times: Times
) -> Iterator[_Changes]:
    columns = work.columns
    whole = np.array([cost.activation_bytes for cost in costs], float)
    held = np.array([cost.weight_grad_held_bytes for cost in costs], float)
    trainable = np.array([s.trainable for s in work.schedule.program.stages])

    def at(rows: Ints, time_s: Floats, of_stage: Floats) -> _Changes:
        return _Changes(
            columns.device[rows], time_s[rows], of_stage[columns.stage[rows]]
        )

    forward = _rows(columns, Kind.FORWARD)
    yield at(forward, times.start_s, whole)
    yield at(forward, times.end_s, np.where(trainable, 0.0, -whole))
    yield at(_rows(columns, Kind.BACKWARD), times.end_s, -whole)
    yield at(_rows(columns, Kind.BACKWARD_INPUT), times.end_s, held - whole)
    yield at(_rows(columns, Kind.BACKWARD_WEIGHT), times.end_s, -held)


def _old_weights(
    work: Work, costs: Sequence[StageCost], times: Times
) -> Iterator[_Changes]:
    columns, needs = work.columns, work.needs
    numbers = ValueNumbers.of(work.schedule.program)
    fact, stage = numbers.fact_and_stage(needs.value)
    of_weights = np.flatnonzero(fact == FACTS.index(Fact.WEIGHTS))
    row, stage = needs.row[of_weights], stage[of_weights]
    versions, version = np.unique(needs.value[of_weights], return_inverse=True)
    is_update = columns.kind[row] == CODES[Kind.UPDATE]
    overwrites = is_update & (columns.stage[row] == stage)
    last_read_s = np.zeros(versions.size)
    reads = ~overwrites
    np.maximum.at(last_read_s, version[reads], times.end_s[row[reads]])
    size = np.array([cost.weight_bytes for cost in costs], float)
    yield from _held(
        columns.device[row[overwrites]],
        times.start_s[row[overwrites]],
        last_read_s[version[overwrites]],
        size[stage[overwrites]],
    )


def _outputs(
    work: Work, costs: Sequence[StageCost], times: Times
) -> Iterator[_Changes]:
    columns, needs, stages = work.columns, work.needs, work.schedule.program.stages
    released_s = times.end_s.copy()
    local = (needs.arrival == LOCAL) & (needs.maker >= 0)
    np.maximum.at(released_s, needs.maker[local], times.end_s[needs.row[local]])
    np.maximum.at(released_s, work.messages.maker, times.arrived_s)
    forward = _rows(columns, Kind.FORWARD)
    size = np.array(
        [
            0.0 if stage.trainable else cost.output_bytes
            for stage, cost in zip(stages, costs, strict=True)
        ]
    )
    yield from _held(
        columns.device[forward],
        times.end_s[forward],
        released_s[forward],
        size[columns.stage[forward]],
    )


def _received(work: Work, times: Times) -> Iterator[_Changes]:
    needs, messages = work.needs, work.messages
    last_read_s = np.zeros(needs.arrivals.maker.size + 1)  # and one that nobody reads
    remote = needs.arrival != LOCAL
    np.maximum.at(last_read_s, needs.arrival[remote], times.end_s[needs.row[remote]])
    is_implicit = messages.receiver == NO_OP
    posted_s = times.start_s[messages.receiver]
    yield from _held(
        messages.to_device,
        np.where(is_implicit, times.sent_s, posted_s),
        last_read_s[messages.arrival],
        messages.num_bytes.astype(float),
    )


def _rows(columns: Columns, kind: Kind) -> Ints:
    return np.flatnonzero(columns.kind == CODES[kind])


def _held(
    device: Ints, begin_s: Floats, end_s: Floats, num_bytes: Floats
) -> Iterator[_Changes]:
    """Bytes that are there from begin to end, where the end is later."""
    lasts = np.flatnonzero(end_s > begin_s)
    yield _Changes(device[lasts], begin_s[lasts], num_bytes[lasts])
    yield _Changes(device[lasts], end_s[lasts], -num_bytes[lasts])
