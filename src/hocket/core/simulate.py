"""Predict when every op and message of a schedule happens, without running it.

The model:

- A lane does its ops in order. An op begins when its lane is free and all that it needs
  (see `dataflow`) is on its device.
- A value that another device needs goes there in one message, over
  `costs.link_between`: it waits until those before it have left the link, occupies
  the link for `bytes / bytes_per_s`, and is usable `latency_s` later. It is ready to
  go when it is made and its lane has handled it; or, where messages are ops, when both
  its SEND and its RECV have been reached.
- `costs.handling` keeps a lane busy after an op for each message that it sends, and
  before an op for each that it reads (the first lane to be listed that needs it). It is
  a part of no op. A RECV itself takes no time.
- R, G and UNSHARD begin when they are reached and the device's last collective has
  ended; their lane goes on at once. All replicas run in lockstep: one is simulated.
  Where stages are copies of one another, U waits for the R of each. Where stages are
  sharded, an op that reads weights waits for the UNSHARD before it in its lane.
- With `costs.jitter`, an op takes longer or shorter than the mean, at random but the
  same at every call; the ops of one kind and stage take the mean together.
- While `n` lanes of a device work, each is `min(1, lane_capacity / n)` as fast.

What it leaves out: the norms that workers exchange at a gate, that messages slow the
devices at their ends, and that a device waits for memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from hocket.core.costs import Costs
from hocket.core.gates import Gates, gates_of
from hocket.core.op import Kind
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.simulator.clocks import is_decided_by_lanes, play_events, play_in_order
from hocket.core.simulator.columns import CODES, KINDS
from hocket.core.simulator.memory import Times, memory_curves
from hocket.core.simulator.needs import LOCAL, UNREAD
from hocket.core.simulator.work import Work, prepare
from hocket.core.timelines.arrays import Floats, Ints
from hocket.core.timelines.memory import Traffic
from hocket.core.timelines.timeline import Origin, Timeline

_NUM_SETTLING: Final = 4  # steps until all steps take equally long, or nearly


def simulate(schedule: Schedule, costs: Costs, gates: Gates = ()) -> Timeline:
    r"""Predict when everything in a schedule happens.

    Args:
        schedule: one that `check` accepts; others may be refused with less said.
        costs: the costs of its program.
        gates: stages whose gradients are judged and applied together, as `gates_of`
            returns them: an update waits for the gradients of all of its gate's.

    Raises:
        CostsError: the costs do not fit the program.
        DeadlockError: no lane can move; it names where each stands, and why.
        ScheduleError: ops that are not of the program, or are there twice.

    >>> from hocket.core.costs import Costs
    >>> schedule = Schedule.parse("d0  0F0 0F1 0B0 0B1\nd1  1F0 1B0 1F1 1B1")
    >>> timeline = simulate(schedule, Costs.uniform())
    >>> timeline.makespan_s, timeline.bubble_fraction
    (9.0, 0.333...)
    """
    work = prepare(schedule, costs, gates)
    decided = is_decided_by_lanes(work)
    clock = play_in_order(work) if decided else play_events(work, costs)
    return _timeline(work, costs, clock.times, clock.reduced_s, Origin.SIMULATED)


def long_step_s(schedule: Schedule, costs: Costs) -> float:
    """Return how long a step takes in a long run.

    Args:
        schedule: an order of one step, or one with a body. If it flushes, updates wait
            for all gradients of their step.
        costs: the costs of its program.
    """
    num_steps = schedule.program.num_steps + _NUM_SETTLING
    gates = gates_of(schedule, clips=False)
    few_s, many_s = (
        simulate(schedule.with_num_steps(num), costs, gates).makespan_s
        for num in (num_steps, num_steps + _NUM_SETTLING)
    )
    step_s = (many_s - few_s) / _NUM_SETTLING
    return float(f"{step_s:.9g}")  # sums differ in their last digits


def observed(
    schedule: Schedule,
    costs: Costs,
    start_s: Sequence[Floats],
    end_s: Sequence[Floats],
    origin: Origin,
) -> Timeline:
    """Make a timeline of measured times, with the bytes that the costs predict.

    A message counts as on its way from the end of the op that made it until the first
    op that reads it starts: later than it arrived, if the reader was busy.

    Args:
        schedule: what was done.
        costs: say how many bytes everything has.
        start_s: the start of each op, one array per lane.
        end_s: the end of each op, one array per lane.
        origin: measured or emulated.
    """
    work = prepare(schedule, costs)
    needs, messages = work.needs, work.messages
    start, end = np.concatenate([*start_s]), np.concatenate([*end_s])
    read_s = np.full(needs.arrivals.maker.size + 1, np.inf)  # and one that is not read
    remote = needs.arrival != LOCAL
    np.minimum.at(read_s, needs.arrival[remote], start[needs.row[remote]])
    sent_s = end[messages.maker]
    first_s = np.where(messages.arrival == UNREAD, sent_s, read_s[messages.arrival])
    arrived_s = np.maximum(sent_s, first_s)  # two devices' clocks may differ a little
    times = Times(start, end, sent_s, arrived_s)
    reduced = np.flatnonzero(work.is_collective).tolist()
    reduced_s = {row: float(start[row]) for row in reduced}
    return _timeline(work, costs, times, reduced_s, origin)


def _timeline(
    work: Work,
    costs: Costs,
    times: Times,
    reduced_s: Mapping[int, float],
    origin: Origin,
) -> Timeline:
    return Timeline(
        work.schedule,
        _by_lane(times.start_s, work),
        _by_lane(times.end_s, work),
        _traffic(work, costs, times, reduced_s),
        memory_curves(work, costs, times),
        origin,
    )


def _collective_bytes(program: Program, costs: Costs) -> Ints:
    """Return the bytes of each collective, by kind and stage."""
    sizes = np.zeros((len(KINDS), program.num_stages), np.int64)
    for stage, cost in enumerate(costs.of(program)):
        num_outputs = program.num_microbatches_of(stage)
        sizes[CODES[Kind.REDUCE], stage] = cost.gradient_bytes
        sizes[CODES[Kind.UNSHARD], stage] = cost.whole_bytes
        sizes[CODES[Kind.GATHER], stage] = cost.output_bytes * num_outputs
    return sizes


def _by_lane(column: Floats, work: Work) -> tuple[Floats, ...]:
    return tuple(np.split(column, work.columns.first[1:-1]))


def _traffic(
    work: Work, costs: Costs, times: Times, reduced_s: Mapping[int, float]
) -> Traffic:
    """Return the messages and the collectives, in order of start."""
    columns, messages = work.columns, work.messages
    collectives = np.array(sorted(reduced_s), np.int64)
    begin_s = np.array([reduced_s[row] for row in collectives.tolist()], float)
    rows = np.concatenate((messages.maker, collectives))
    table = _collective_bytes(work.schedule.program, costs)
    sizes = table[columns.kind[collectives], columns.stage[collectives]]
    traffic = Traffic(
        columns.lane[rows],
        rows - np.array(columns.first)[columns.lane[rows]],
        np.concatenate((messages.from_device, columns.device[collectives])),
        np.concatenate((messages.to_device, columns.device[collectives])),
        np.concatenate((times.sent_s, begin_s)),
        np.concatenate((times.arrived_s, times.end_s[collectives])),
        np.concatenate((messages.num_bytes, sizes)),
    )
    return traffic.taken(np.argsort(traffic.start_s, kind="stable"))
