"""Add up the bytes on each device over time, from when everything happened.

What is counted, of each stage, and for how long:

    one version of the weights           always
    the optimizer's state                always, where the stage is trained
    gradients                            from the end of a step's first B (or W), or all
                                         along, until its U has ended; where the stage
                                         is sharded, one shard of them from R on
    an older version of the weights      from the U that would overwrite it until the
                                         last op that reads it has ended
    activation_bytes                     F ├──────────┤ B      forward only: F ├─┤
      with the backward split            F ├──────────┤ I
      weight_grad_held_bytes                          I ├────┤ W
      where the stage recomputes                    B ├─┤
        replay_bytes                     F ├──────────┤ B
        forward_work_bytes               F ├─┤
    backward_work_bytes                             B ├─┤
    input_grad_work_bytes                           I ├─┤
    weight_grad_work_bytes                                 W ├─┤
    update_work_bytes                                            U ├─┤
    gradients, once more                                    R ├──┤
    whole weights                        UNSHARD ├────────┤ RESHARD
    all replicas' outputs                from the start of G until L has ended, or until
                                         they are sent
    the output, where only forward runs  from the end of F until it is sent and read
    the output, read on its own device   from the end of F until the reader's B ended
      and the gradient that comes back   from the end of B until the reader's B ended
    a received message                   from when it is on its way (or the RECV is
                                         posted) until the last op that needs it ended;
                                         the input of an F until its B has ended, or
                                         its W (its I, if W has no use for it)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import numpy as np

from hocket.core.costs import Costs, StageCost
from hocket.core.dataflow import Fact
from hocket.core.op import BACKWARDS, MAKES_WEIGHT_GRAD, Kind
from hocket.core.program import Program
from hocket.core.simulator.columns import CODES, FACTS, Columns, ValueNumbers
from hocket.core.simulator.needs import LOCAL, NO_OP
from hocket.core.simulator.work import Work, prepare
from hocket.core.timelines.arrays import Floats, Ints
from hocket.core.timelines.memory import MemoryCurve
from hocket.core.timelines.timeline import Timeline


class Times(NamedTuple):
    """Start and end of each op, and of each message."""

    start_s: Floats
    end_s: Floats
    sent_s: Floats
    arrived_s: Floats


class _Changes(NamedTuple):
    """Bytes allocated (above 0) and freed (below 0), one entry per change."""

    device: Ints
    time_s: Floats
    num_bytes: Floats


def memory_curves(work: Work, costs: Costs, times: Times) -> tuple[MemoryCurve, ...]:
    """Return the bytes alive over time, a curve per device."""
    program = work.schedule.program
    stage_costs = costs.of(program)
    released_s = _released_s(work, stage_costs, times)
    changes = (
        *_activations(work, stage_costs, times),
        *_work(work, stage_costs, times),
        *_gradients(work, costs, times),
        *_old_weights(work, program, stage_costs, times),
        *_whole_weights(work, stage_costs, times),
        *_outputs(work, stage_costs, times, released_s),
        *_gathered(work, stage_costs, times),
        *_received(work, times, released_s),
    )
    return _curves(changes, always_bytes(program, stage_costs))


def _curves(
    changes: Sequence[_Changes], start: Sequence[float]
) -> tuple[MemoryCurve, ...]:
    """Add up the changes to one curve per device, beginning at `start`."""
    device, time_s, num_bytes = (np.concatenate(c) for c in zip(*changes, strict=True))
    kept = np.flatnonzero(num_bytes)
    kept = kept[np.argsort(device[kept], kind="stable")]
    bounds = np.searchsorted(device[kept], np.arange(1, len(start)))
    return tuple(
        MemoryCurve.of_changes(time_s[of_one], num_bytes[of_one], before)
        for of_one, before in zip(np.split(kept, bounds), start, strict=True)
    )


def always_bytes(program: Program, costs: Sequence[StageCost]) -> tuple[int, ...]:
    """Return what each device always holds: weights and optimizer state."""
    num_bytes = [0] * program.num_devices
    for stage, cost in zip(program.stages, costs, strict=True):
        num_bytes[stage.device] += cost.weight_bytes
        num_bytes[stage.device] += cost.optimizer_bytes * stage.trainable
    return tuple(num_bytes)


def _released_s(work: Work, costs: Sequence[StageCost], times: Times) -> Floats:
    """Return when each op releases what it read: an F when its B has ended.

    For the B needs the input too: for the gradients of the weights, or to run the F
    once more.
    """
    columns = work.columns
    numbers = ValueNumbers.of(work.schedule.program)
    key = columns.stage * numbers.num_steps + columns.step
    key = key * numbers.num_microbatches + columns.microbatch
    holds = np.array([cost.holds_input for cost in costs])[columns.stage]
    is_last = columns.is_any(frozenset({Kind.BACKWARD_WEIGHT})) & holds
    backward = np.flatnonzero(columns.is_any(BACKWARDS) | is_last)
    forward = _rows(columns, Kind.FORWARD)
    last_s = np.zeros(key.max(initial=0) + 1)
    np.maximum.at(last_s, key[backward], times.end_s[backward])
    released_s: Floats = times.end_s.copy()
    released_s[forward] = np.maximum(released_s[forward], last_s[key[forward]])
    return released_s


def _activations(
    work: Work, costs: Sequence[StageCost], times: Times
) -> Iterator[_Changes]:
    columns = work.columns
    whole = np.array([cost.activation_bytes for cost in costs], float)
    kept = np.array([cost.kept_bytes for cost in costs], float)
    held = np.array([cost.weight_grad_held_bytes for cost in costs], float)
    trainable = np.array([s.trainable for s in work.schedule.program.stages])
    kept = np.where(trainable, kept, whole)

    def at(rows: Ints, time_s: Floats, of_stage: Floats) -> _Changes:
        return _Changes(
            columns.device[rows], time_s[rows], of_stage[columns.stage[rows]]
        )

    forward = _rows(columns, Kind.FORWARD)
    yield at(forward, times.start_s, kept)
    yield at(forward, times.end_s, np.where(trainable, 0.0, -whole))
    for kind, left in ((Kind.BACKWARD, 0.0), (Kind.BACKWARD_INPUT, held)):
        rows = _rows(columns, kind)
        yield at(rows, times.start_s, whole - kept)
        yield at(rows, times.end_s, left - whole)
    yield at(_rows(columns, Kind.BACKWARD_WEIGHT), times.end_s, -held)


def _work(work: Work, costs: Sequence[StageCost], times: Times) -> Iterator[_Changes]:
    """Yield what ops hold while they run, and no longer."""
    columns = work.columns
    for kind in _WORKS:
        sizes = [cost.work_bytes(kind) for cost in costs]
        yield from _held_by(columns, kind, times.start_s, times.end_s, sizes)


_WORKS: Final = (
    *(Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT),
    *(Kind.REDUCE, Kind.UPDATE),
)


def _gradients(work: Work, costs: Costs, times: Times) -> Iterator[_Changes]:
    """Yield gradients; the first B's gradients reuse the memory that it frees."""
    columns, program = work.columns, work.schedule.program
    key = columns.stage * program.num_steps + columns.step
    num_keys = program.num_stages * program.num_steps
    makers = np.flatnonzero(columns.is_any(MAKES_WEIGHT_GRAD))
    updates = _rows(columns, Kind.UPDATE)
    begin_s = np.full(num_keys, np.inf)
    np.minimum.at(begin_s, key[makers], times.end_s[makers])
    lasts_s = np.zeros(num_keys) if costs.accumulates else begin_s
    end_s = np.full(num_keys, times.end_s.max(initial=0.0))
    end_s[key[updates]] = times.end_s[updates]
    of_stage = np.repeat(np.arange(program.num_stages), program.num_steps)
    device = np.array([stage.device for stage in program.stages])[of_stage]
    size = np.array([cost.gradient_bytes for cost in costs.of(program)])[of_stage]
    part = -(-size // program.num_shards)
    yield from _held(device, lasts_s, end_s, part.astype(float))
    if program.num_shards > 1:
        reduces = _rows(columns, Kind.REDUCE)
        end_s[key[reduces]] = times.end_s[reduces]
        yield from _held(device, begin_s, end_s, (size - part).astype(float))


def _old_weights(
    work: Work, program: Program, costs: Sequence[StageCost], times: Times
) -> Iterator[_Changes]:
    columns, needs = work.columns, work.needs
    numbers = ValueNumbers.of(program)
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


def _whole_weights(
    work: Work, costs: Sequence[StageCost], times: Times
) -> Iterator[_Changes]:
    """Yield what is gathered of sharded stages, until the RESHARD that needs it."""
    columns, needs = work.columns, work.needs
    is_release = columns.kind[needs.row] == CODES[Kind.RESHARD]
    pairs = np.flatnonzero(is_release & (needs.maker >= 0))
    gathers, releases = needs.maker[pairs], needs.row[pairs]
    size = np.array([cost.whole_bytes for cost in costs], float)
    yield from _held(
        columns.device[gathers],
        times.start_s[gathers],
        times.end_s[releases],
        size[columns.stage[gathers]],
    )


def _outputs(
    work: Work, costs: Sequence[StageCost], times: Times, released_s: Floats
) -> Iterator[_Changes]:
    """Yield outputs that stay where they were made until they are sent or read."""
    columns, needs, stages = work.columns, work.needs, work.schedule.program.stages
    trainable = np.array([stage.trainable for stage in stages])
    until_s = times.end_s.copy()
    maker = np.maximum(needs.maker, 0)
    is_local = (needs.arrival == LOCAL) & (needs.maker >= 0)
    elsewhere = is_local & (columns.stage[maker] != columns.stage[needs.row])
    np.maximum.at(until_s, maker[elsewhere], released_s[needs.row[elsewhere]])
    own = is_local & ~elsewhere & ~trainable[columns.stage[maker]]
    np.maximum.at(until_s, maker[own], times.end_s[needs.row[own]])
    is_sent = ~trainable[columns.stage[work.messages.maker]]
    sent = work.messages.maker[is_sent]
    np.maximum.at(until_s, sent, times.arrived_s[is_sent])
    for kind, size in (
        (Kind.FORWARD, [cost.output_bytes for cost in costs]),
        (Kind.BACKWARD, [cost.input_grad_bytes for cost in costs]),
        (Kind.BACKWARD_INPUT, [cost.input_grad_bytes for cost in costs]),
    ):
        yield from _held_by(columns, kind, times.end_s, until_s, size)


def _gathered(
    work: Work, costs: Sequence[StageCost], times: Times
) -> Iterator[_Changes]:
    """Yield gathered outputs, from the start of G until their last reader has ended."""
    columns, needs, program = work.columns, work.needs, work.schedule.program
    until_s = times.end_s.copy()
    is_local = (needs.arrival == LOCAL) & (needs.maker >= 0)
    np.maximum.at(until_s, needs.maker[is_local], times.end_s[needs.row[is_local]])
    np.maximum.at(until_s, work.messages.maker, times.arrived_s)
    sizes = [
        cost.output_bytes * program.num_microbatches_of(s) * program.num_pipelines
        for s, cost in enumerate(costs)
    ]
    yield from _held_by(columns, Kind.GATHER, times.start_s, until_s, sizes)


def _received(work: Work, times: Times, released_s: Floats) -> Iterator[_Changes]:
    needs, messages = work.needs, work.messages
    last_read_s = np.zeros(needs.arrivals.maker.size + 1)  # and one that is not read
    remote = needs.arrival != LOCAL
    np.maximum.at(last_read_s, needs.arrival[remote], released_s[needs.row[remote]])
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


def _held_by(
    columns: Columns, kind: Kind, begin_s: Floats, end_s: Floats, sizes: Sequence[int]
) -> Iterator[_Changes]:
    """Yield the bytes of all ops of a kind, given times by op and sizes by stage."""
    rows = _rows(columns, kind)
    num_bytes = np.array(sizes, float)[columns.stage[rows]]
    return _held(columns.device[rows], begin_s[rows], end_s[rows], num_bytes)


def _held(
    device: Ints, begin_s: Floats, end_s: Floats, num_bytes: Floats
) -> Iterator[_Changes]:
    """Yield bytes that are there from begin to end, where the end is later."""
    lasts = np.flatnonzero(end_s > begin_s)
    yield _Changes(device[lasts], begin_s[lasts], num_bytes[lasts])
    yield _Changes(device[lasts], end_s[lasts], -num_bytes[lasts])


# Divide what a device holds at its peak into parts.

_NO_TIMES = np.zeros(0)


@dataclass(frozen=True, slots=True)
class PeakBytes:
    """The parts of one device's peak.

    Args:
        weight_bytes: one version of the weights, what shards have gathered, and
            buffers.
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
    none = [0] * program.num_devices
    lasting = _activations(work, stage_costs, times)
    activations = _curves([*lasting, *_work(work, stage_costs, times)], none)
    gradients = _curves(tuple(_gradients(work, costs, times)), none)
    gathered = _curves(tuple(_whole_weights(work, stage_costs, times)), none)
    parts = []
    for device, own in enumerate(program.stages_on):
        peak = timeline.peak_bytes(device)
        curve = timeline.memory[device]
        time_s = float(curve.time_s[curve.amount.argmax()])
        weights = sum(stage_costs[stage].weight_bytes for stage in own)
        weights += round(gathered[device].at(time_s))
        trained = [stage for stage in own if program.stages[stage].trainable]
        states = sum(stage_costs[stage].optimizer_bytes for stage in trained)
        alive = round(activations[device].at(time_s))
        grads = round(gradients[device].at(time_s))
        rest = round(peak) - weights - states - alive - grads
        parts.append(PeakBytes(weights, grads, states, alive, rest))
    return tuple(parts)
