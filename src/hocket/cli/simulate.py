"""`hocket simulate`: prints the numbers of a schedule's predicted timeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

import typer

from hocket.cli.shared.options import (
    JsonOption,
    Sizes,
    UniformCosts,
    WhatIf,
    load_timeline,
    simulated,
    with_options,
)
from hocket.cli.shared.output import aligned, sentence
from hocket.core.costs import Costs
from hocket.core.timelines.idle import idle_by_cause
from hocket.core.timelines.timeline import Origin, Timeline
from hocket.draw.quantity import byte_size, percent, seconds, short
from hocket.draw.summary import peak_bytes
from hocket.draw.where import Where, advice, idle_rows
from hocket.errors import PlanError

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SCHEDULE",
        help="A schedule's name, or a file: its text, PyTorch's CSV (*.csv), a "
        "timeline (*.json).",
    ),
]


@with_options
def simulate_command(
    source: SourceArgument,
    sizes: Sizes,
    costs: UniformCosts,
    what_if: WhatIf,
    as_json: JsonOption = False,
) -> None:
    """Simulate a schedule: makespan, idle time by cause, memory and bytes sent.

    All devices are equal and take the seconds given; or the costs are those of a run
    (--costs). --slow, --link and --jitter change them: the numbers are
    then those with the change, beside the time without it.
    """
    known = what_if.read()
    given = costs.make() if known is None else known
    if known is not None and sizes.devices is None:
        sizes = replace(sizes, devices=len(known.stages))
    timeline = load_timeline(source, sizes, given)
    before = timeline
    if what_if.is_asked:
        timeline = _changed(timeline, given, what_if)
    if as_json:
        import json

        typer.echo(json.dumps(_document(timeline), indent=2))
    else:
        if before is not timeline:
            typer.echo(_difference(before, timeline))
        typer.echo("\n".join(_report(timeline)))


def _changed(timeline: Timeline, costs: Costs, what_if: WhatIf) -> Timeline:
    """Return the timeline with the costs that are asked for.

    Raises:
        PlanError: the timeline was read from a file: it has no costs.
    """
    schedule = timeline.schedule
    if timeline.origin is not Origin.SIMULATED:
        raise PlanError("a measured timeline has no costs to change: name a schedule")
    return simulated(schedule, what_if.changed(costs, schedule.program))


def _difference(before: Timeline, after: Timeline) -> str:
    change = after.step_s / before.step_s - 1 if before.step_s else 0.0
    return (
        f"what if: a step of {seconds(after.step_s)} instead of "
        f"{seconds(before.step_s)}, {100 * change:+.1f} %\n"
    )


def _document(timeline: Timeline) -> dict[str, Any]:
    idle, peaks = idle_by_cause(timeline), dict(enumerate(peak_bytes(timeline)))
    return {
        "origin": timeline.origin.value,
        "makespan_s": timeline.makespan_s,
        "step_s": timeline.step_s,
        "bubble_fraction": timeline.bubble_fraction,
        "steady_bubble_fraction": timeline.steady_bubble_fraction,
        "idle_s": {cause.value: idle_s for cause, idle_s in idle.seconds.items()},
        "lanes": [
            {
                "lane": lane.label,
                "bubble_fraction": timeline.lane_bubble_fraction(i),
                "idle_s": {c.value: idle_s for c, idle_s in idle.lane_s(i).items()},
            }
            for i, lane in enumerate(timeline.schedule.lanes)
        ],
        "devices": [
            {
                "device": device,
                "peak_microbatches": timeline.peak_microbatches(device),
                "peak_activations": timeline.peak_activations(device),
                "peak_bytes": peaks.get(device),
            }
            for device in range(timeline.schedule.program.num_devices)
        ],
        "links": [
            {"from_device": ends[0], "to_device": ends[1], "num_bytes": num_bytes}
            for ends, num_bytes in timeline.link_bytes().items()
        ],
    }


def _report(timeline: Timeline) -> Iterator[str]:
    yield from aligned(
        [
            ("makespan", seconds(timeline.makespan_s)),
            ("step", seconds(timeline.step_s)),
            ("bubble", percent(timeline.bubble_fraction)),
            ("steady bubble", percent(timeline.steady_bubble_fraction)),
        ]
    )
    where = Where.of(timeline)
    rows = idle_rows(where.idle)
    if rows:
        yield ""
        yield from aligned([("idle because of", "share", "per step"), *rows])
    yield ""
    yield from aligned(_lane_rows(timeline))
    lines = advice(where)
    if lines:
        yield ""
        yield from (part for line in lines for part in sentence(line))
    links = {ends: n for ends, n in timeline.link_bytes().items() if n}
    if links:
        sent = [(f"d{a} to d{b}", byte_size(n)) for (a, b), n in links.items()]
        yield ""
        yield from aligned([("link", "sent"), *sent])


def _lane_rows(timeline: Timeline) -> Iterator[tuple[str, ...]]:
    peaks = peak_bytes(timeline)
    heads = "peak microbatches, F to W", "peak activations, F to I"
    yield ("lane", "bubble", *heads, *(("peak bytes of tensors",) if peaks else ()))
    for i, lane in enumerate(timeline.schedule.lanes):
        bubble = percent(timeline.lane_bubble_fraction(i))
        peak = (byte_size(peaks[lane.device]),) if peaks else ()
        alive = timeline.peak_microbatches, timeline.peak_activations
        units = (short(peak_of(lane.device)) for peak_of in alive)
        yield (lane.label, bubble, *units, *peak)
