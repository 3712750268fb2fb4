"""Say in short lines where a timeline's time went, and what would shorten a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from hocket.core.timelines.causality import CriticalPath, PathKind, critical_path
from hocket.core.timelines.idle import Cause, Idle, idle_by_cause
from hocket.core.timelines.timeline import Timeline
from hocket.draw.quantity import percent, seconds

MEANINGS: Final = {
    Cause.FILL: "waiting for other devices' work before the pipeline is full, and "
    "after it has begun to drain",
    Cause.MESSAGE: "waiting for a message that is on its way, here or at the device "
    "that is waited for",
    Cause.REDUCTION: "waiting until gradients are summed over replicas, or weights "
    "are gathered from shards",
    Cause.IMBALANCE: "waiting because this device has less work than the busiest one",
    Cause.OTHER: "waiting for other devices while the pipeline is full: the order of "
    "ops, or ops of uneven length",
    Cause.HOST: "all that the next op needs is there, and it does not begin yet",
    Cause.DATA: "waiting for the loader to yield the next batch",
    Cause.JOB: "held back for another job that shares the device",
}
_LEAST: Final = 0.005  # of a step: a smaller saving is not worth a line


@dataclass(frozen=True, slots=True)
class Where:
    """Where a timeline's time went.

    Args:
        idle: the idle time by cause.
        path: the critical path.
    """

    idle: Idle
    path: CriticalPath

    @classmethod
    def of(cls, timeline: Timeline) -> Where:
        """Return it for any timeline of a whole schedule.

        Raises:
            ScheduleError: ops that are not of the program, or are there twice.
        """
        return cls(idle_by_cause(timeline), critical_path(timeline))


def idle_rows(idle: Idle) -> list[tuple[str, str, str]]:
    """Return each cause that takes time: its name, its share, its seconds per step.

    The largest comes first. The shares are of the makespan, the mean over lanes.
    """
    num_steps = idle.timeline.schedule.program.num_steps
    causes = sorted(Cause, key=lambda cause: -idle.seconds[cause])
    return [
        (cause.value, percent(share), seconds(idle.seconds[cause] / num_steps))
        for cause in causes
        if percent(share := idle.fractions[cause]) != "0 %"
    ]


def idle_line(idle: Idle) -> str:
    """Return the causes in one line: `warm-up and drain 20.1 %, messages 3.0 %`."""
    rows = idle_rows(idle)
    return ", ".join(f"{name} {share}" for name, share, _ in rows) or "none"


def advice(where: Where, core_wait_s: float = 0.0) -> list[str]:
    """Return what would shorten a step, the largest saving first; a line each.

    A saving is the time that the cause takes on the critical path, or on the mean lane:
    the most that can be gained, since another path may be nearly as long.

    Args:
        where: where the time went.
        core_wait_s: how long of it the worker waited for a core that others had.
    """
    timeline = where.idle.timeline
    num_steps = timeline.schedule.program.num_steps
    least_s = _LEAST * timeline.makespan_s
    found = sorted(_savings(where, core_wait_s), reverse=True)
    return [
        text.format(seconds(saved_s / num_steps))
        for saved_s, text in found
        if saved_s > least_s
    ]


def _savings(where: Where, core_wait_s: float) -> Iterator[tuple[float, str]]:
    """Yield what each change may save, and a sentence with a place for it."""
    path_s, timeline = where.path.seconds, where.idle.timeline
    yield from _uneven(timeline)
    if where.path.link_s:
        link_s = where.path.link_s
        a, b = max(link_s, key=lambda link: link_s[link])
        yield (
            path_s[PathKind.MESSAGE],
            "messages take {} a step of the critical path, most of it from device "
            f"{a} to {b}: a faster link, or another cut",
        )
    yield (
        path_s[PathKind.REDUCTION],
        "reductions take {} a step of the critical path: fewer replicas, or a faster "
        "link between them",
    )
    yield (
        where.idle.seconds[Cause.FILL],
        "warm-up and drain take {} a step of each device: more microbatches, or a "
        "schedule with a smaller bubble",
    )
    yield (
        core_wait_s,
        "other programs or threads have this worker's core for {} a step: stop them",
    )
    yield (
        path_s[PathKind.HOST] - core_wait_s,
        "the host takes {} a step of the critical path: larger microbatches, or "
        "compiled stages",
    )
    yield (
        path_s[PathKind.DATA],
        "batches are late by {} a step of the critical path: more loader workers, or "
        "less work for each sample",
    )


def _uneven(timeline: Timeline) -> Iterator[tuple[float, str]]:
    """Yield what even stages would save: the busiest device's work above the mean."""
    program = timeline.schedule.program
    busy_s = timeline.device_work_s
    mean_s, busiest = sum(busy_s) / len(busy_s), busy_s.index(max(busy_s))
    if mean_s <= 0.0:
        return
    stages = program.stages_on[busiest]
    name = f"stage {stages[0]}"
    if len(stages) > 1:
        name = f"stages {', '.join(map(str, stages))} on device {busiest}"
    more = percent(busy_s[busiest] / mean_s - 1)
    verb = "is" if len(stages) == 1 else "are"
    yield (
        busy_s[busiest] - mean_s,
        f"{name} {verb} {more} longer than the mean of all devices: {{}} a step",
    )
