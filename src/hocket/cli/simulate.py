"""`hocket simulate`: prints the numbers of a schedule's predicted timeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hocket.cli.options import Sizes, UniformCosts, with_options
from hocket.cli.output import aligned
from hocket.cli.planning import load_timeline

if TYPE_CHECKING:
    from hocket.core.timelines.timeline import Timeline
    from hocket.draw.summary import Summary

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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers as JSON.")
    ] = False,
) -> None:
    """Simulate a schedule: makespan, bubble, memory and bytes sent.

    All devices are equal and take the seconds given.
    """
    timeline = load_timeline(source, sizes, costs.make())
    if as_json:
        import json

        typer.echo(json.dumps(_document(timeline), indent=2))
    else:
        typer.echo("\n".join(_report(timeline)))


def _document(timeline: Timeline) -> dict[str, Any]:
    from hocket.draw.summary import summarize

    numbers = summarize(timeline)
    return {
        "origin": timeline.origin.value,
        "makespan_s": numbers.makespan_s,
        "step_s": numbers.step_s,
        "bubble_fraction": numbers.bubble,
        "steady_bubble_fraction": numbers.steady_bubble,
        "lanes": [
            {"lane": label, "bubble_fraction": bubble}
            for label, bubble in numbers.lane_bubbles
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
    from hocket.draw.quantity import byte_size, percent, seconds
    from hocket.draw.summary import summarize

    numbers = summarize(timeline)
    yield from aligned(
        [
            ("makespan", seconds(numbers.makespan_s)),
            ("step", seconds(numbers.step_s)),
            ("bubble", percent(numbers.bubble)),
            ("steady bubble", percent(numbers.steady_bubble)),
        ]
    )
    yield ""
    yield from aligned(_lane_rows(timeline, numbers))
    links = {ends: n for ends, n in timeline.link_bytes().items() if n}
    if links:
        rows = [(f"d{a} to d{b}", byte_size(n)) for (a, b), n in links.items()]
        yield ""
        yield from aligned([("link", "sent"), *rows])


def _lane_rows(timeline: Timeline, numbers: Summary) -> Iterator[tuple[str, ...]]:
    from hocket.draw.quantity import byte_size, percent, short

    knows_bytes = bool(numbers.peak_bytes)
    memory = ("peak memory",) if knows_bytes else ()
    yield ("lane", "bubble", "peak activations", *memory)
    for lane, (label, bubble) in zip(
        timeline.schedule.lanes, numbers.lane_bubbles, strict=True
    ):
        units = short(numbers.peak_activations[lane.device])
        peak = (byte_size(numbers.peak_bytes[lane.device]),) if knows_bytes else ()
        yield (label, percent(bubble), units, *peak)
