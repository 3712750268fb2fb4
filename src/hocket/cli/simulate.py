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
from hocket.draw.summary import Summary, summarize
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
    numbers = summarize(timeline)
    idle = idle_by_cause(timeline)
    return {
        "origin": timeline.origin.value,
        "makespan_s": numbers.makespan_s,
        "step_s": numbers.step_s,
        "bubble_fraction": numbers.bubble,
        "steady_bubble_fraction": numbers.steady_bubble,
        "idle_s": {cause.value: idle_s for cause, idle_s in idle.seconds.items()},
        "lanes": [
            {
                "lane": label,
                "bubble_fraction": bubble,
                "idle_s": {c.value: idle_s for c, idle_s in idle.lane_s(lane).items()},
            }
            for lane, (label, bubble) in enumerate(numbers.lane_bubbles)
        ],
        "devices": [
            {
                "device": device,
                "peak_activations": units,
                "peak_bytes": _peak_bytes(numbers, device),
            }
            for device, units in enumerate(numbers.peak_activations)
        ],
        "links": [
            {"from_device": ends[0], "to_device": ends[1], "num_bytes": num_bytes}
            for ends, num_bytes in timeline.link_bytes().items()
        ],
    }


def _peak_bytes(numbers: Summary, device: int) -> float | None:
    return numbers.peak_bytes[device] if numbers.peak_bytes else None


def _report(timeline: Timeline) -> Iterator[str]:
    numbers = summarize(timeline)
    yield from aligned(
        [
            ("makespan", seconds(numbers.makespan_s)),
            ("step", seconds(numbers.step_s)),
            ("bubble", percent(numbers.bubble)),
            ("steady bubble", percent(numbers.steady_bubble)),
        ]
    )
    where = Where.of(timeline)
    rows = idle_rows(where.idle)
    if rows:
        yield ""
        yield from aligned([("idle because of", "share", "per step"), *rows])
    yield ""
    yield from aligned(_lane_rows(timeline, numbers))
    lines = advice(where)
    if lines:
        yield ""
        yield from (part for line in lines for part in sentence(line))
    links = {ends: n for ends, n in timeline.link_bytes().items() if n}
    if links:
        sent = [(f"d{a} to d{b}", byte_size(n)) for (a, b), n in links.items()]
        yield ""
        yield from aligned([("link", "sent"), *sent])


def _lane_rows(timeline: Timeline, numbers: Summary) -> Iterator[tuple[str, ...]]:
    knows_bytes = bool(numbers.peak_bytes)
    memory = ("peak memory",) if knows_bytes else ()
    yield ("lane", "bubble", "peak activations", *memory)
    for lane, (label, bubble) in zip(
        timeline.schedule.lanes, numbers.lane_bubbles, strict=True
    ):
        units = short(numbers.peak_activations[lane.device])
        peak = (byte_size(numbers.peak_bytes[lane.device]),) if knows_bytes else ()
        yield (label, percent(bubble), units, *peak)
