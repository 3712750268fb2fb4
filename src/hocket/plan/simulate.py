"""Schedule + Costs -> Timeline: when everything happens, without running it.

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
- R begins when it is reached and the device's last reduction has ended; its lane goes
  on at once. All replicas run in lockstep: one is simulated.
- While `n` lanes of a device work, each is `min(1, lane_capacity / n)` as fast.

What it leaves out: that messages slow the devices at their ends, that a device waits
for memory, and that seconds vary.
"""

from __future__ import annotations

import numpy as np

from hocket.plan.arrays import Floats
from hocket.plan.costs import Costs
from hocket.plan.schedule import Schedule
from hocket.plan.simulator.events import play_events
from hocket.plan.simulator.in_order import is_decided_by_lanes, play_in_order
from hocket.plan.simulator.memory import Times, memory_curves
from hocket.plan.simulator.played import Played
from hocket.plan.simulator.work import Work, prepare
from hocket.plan.timeline import Timeline
from hocket.plan.traffic import Traffic


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    r"""Predict when everything in a schedule happens.

    Args:
        schedule: one that `check` accepts; others may be refused with less said.
        costs: of the same program.

    Raises:
        CostsError: the costs do not fit the program.
        DeadlockError: no lane can move; it names where each stands, and why.
        ScheduleError: ops that are not of the program, or are there twice.

    >>> from hocket.plan.costs import Costs
    >>> schedule = Schedule.parse("d0  0F0 0F1 0B0 0B1\nd1  1F0 1B0 1F1 1B1")
    >>> timeline = simulate(schedule, Costs.uniform())
    >>> timeline.makespan_s, timeline.bubble_fraction
    (9.0, 0.333...)
    """
    work = prepare(schedule, costs)
    decided = is_decided_by_lanes(work)
    played = play_in_order(work) if decided else play_events(work, costs)
    return _timeline(work, costs, played)


def _timeline(work: Work, costs: Costs, played: Played) -> Timeline:
    times = Times(
        np.array(played.start_s),
        np.array(played.end_s),
        np.array(played.sent_s),
        np.array(played.arrived_s),
    )
    return Timeline(
        work.schedule,
        _by_lane(times.start_s, work),
        _by_lane(times.end_s, work),
        _traffic(work, costs, played, times),
        memory_curves(work, costs, times),
    )


def _by_lane(column: Floats, work: Work) -> tuple[Floats, ...]:
    return tuple(np.split(column, work.columns.first[1:-1]))


def _traffic(work: Work, costs: Costs, played: Played, times: Times) -> Traffic:
    """The messages and the reductions, in order of start."""
    columns, messages = work.columns, work.messages
    reductions = np.array(sorted(played.reduced_s), np.int64)
    begin_s = np.array([played.reduced_s[row] for row in reductions.tolist()], float)
    rows = np.concatenate((messages.maker, reductions))
    sizes = np.array([c.gradient_bytes for c in costs.of(work.schedule.program)])
    traffic = Traffic(
        columns.lane[rows],
        rows - np.array(columns.first)[columns.lane[rows]],
        np.concatenate((messages.from_device, columns.device[reductions])),
        np.concatenate((messages.to_device, columns.device[reductions])),
        np.concatenate((times.sent_s, begin_s)),
        np.concatenate((times.arrived_s, times.end_s[reductions])),
        np.concatenate((messages.num_bytes, sizes[columns.stage[reductions]])),
    )
    return traffic.taken(np.argsort(traffic.start_s, kind="stable"))
