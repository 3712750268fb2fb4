"""Draw timelines as one self-contained HTML page, which loads nothing; or as a card."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from hocket.core.costs import Costs
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.idle import Cause, idle_by_cause
from hocket.core.timelines.timeline import Timeline
from hocket.draw.html.content import Chart, Facts, Figure, Table
from hocket.draw.html.data import page_data, surface_variables
from hocket.draw.layout import Style, Titled, as_panels, lay_out
from hocket.draw.palette import Theme
from hocket.draw.quantity import byte_size, percent, seconds, short
from hocket.draw.summary import (
    knows_bytes,
    peak_activations,
    peak_bytes,
    peak_microbatches,
    sent_bytes,
    sizes_text,
)
from hocket.draw.svg import svg_of
from hocket.draw.text import to_text
from hocket.draw.where import MEANINGS as CAUSES
from hocket.draw.where import Where, advice, idle_line

if TYPE_CHECKING:
    from jinja2 import Template


# In this order they make one script; each says what it holds.
_SCRIPTS: Final = (
    "text.js",
    "model.js",
    "view.js",
    "paint.js",
    "scales.js",
    "marks.js",
    "hover.js",
    "input.js",
    "overview.js",
    "charts.js",
    "main.js",
)
Row = tuple[str, ...]
_ALIVE: Final = {
    "peak microbatches, F to W": peak_microbatches,
    "peak activations, F to I": peak_activations,
}

MEANINGS: Final = {
    "makespan": "from the start of the first op to the end of the last one",
    "time per step": "the makespan, divided by the number of steps; where steps "
    "overlap, from the end of one to the end of the next",
    "samples/s of a step": "its samples by that time: what is between steps, such as "
    "waits for batches, does not count",
    "bubble": "the share of the makespan in which a lane does not work: the mean over "
    "lanes",
    "steady bubble": "the same while the pipeline is full: after the end of warm-up, "
    "and before the pipeline begins to drain",
    "peak bytes of tensors": "the most bytes alive at once on the device that holds "
    "most",
    "peak microbatches, F to W": "the most microbatches at once on a device, from the "
    "start of their forward to the end of their weight gradient, counted in shares of "
    "its stages",
    "peak activations, F to I": "the same to the end of the gradient of the input: of "
    "what a forward has left, a weight gradient that comes later holds a part",
    "sent over links": "bytes from device to device, reductions not among them",
    **{cause.value: meaning for cause, meaning in CAUSES.items()},
}


# Make the tables of a page: each timeline's numbers, and their differences.
def idle_table(timelines: Sequence[Titled], wheres: Sequence[Where]) -> Table:
    """Return the idle time of each timeline by cause: shares of its makespan."""
    names = [title or timeline.origin.value for title, timeline in timelines]
    heads = (*names, "difference") if len(names) == 2 else tuple(names)
    rows = []
    for cause in Cause:
        shares = [where.idle.fractions[cause] for where in wheres]
        if any(percent(share) != "0 %" for share in shares):
            rows.append(_row(cause.value, shares, percent, _points))
    return Table("", ("idle because of", *heads), tuple(rows))


def number_tables(
    timelines: Sequence[Titled], samples_per_step: float | None
) -> tuple[Table, Table]:
    """Return two tables: one of whole timelines, one of each lane.

    Where there are two timelines, the last column is the second compared with the
    first.
    """
    lines = [timeline for _, timeline in timelines]
    names = [title or timeline.origin.value for title, timeline in timelines]
    heads = (*names, "difference") if len(names) == 2 else tuple(names)
    whole = Table("", ("", *heads), tuple(_whole(lines, samples_per_step)))
    return whole, _lanes(lines, heads)


def _whole(lines: Sequence[Timeline], samples_per_step: float | None) -> Iterator[Row]:
    steps_s = [x.step_s for x in lines]
    yield _row("makespan", [x.makespan_s for x in lines], seconds, _ratio)
    yield _row("time per step", steps_s, seconds, _ratio)
    if samples_per_step is not None:
        rates = [samples_per_step / step_s if step_s else 0.0 for step_s in steps_s]
        yield _row("samples/s of a step", rates, short, _ratio)
    yield _row("bubble", [x.bubble_fraction for x in lines], percent, _points)
    steady = [x.steady_bubble_fraction for x in lines]
    yield _row("steady bubble", steady, percent, _points)
    peaks = [max(peak_bytes(x), default=0.0) for x in lines]
    if any(peaks):
        yield _row("peak bytes of tensors", peaks, _known_bytes, _ratio)
    for name, peaks_of in _ALIVE.items():
        yield _row(name, [max(peaks_of(x)) for x in lines], short, _ratio)
    sent = [float(sent_bytes(x)) for x in lines]
    if any(sent):
        yield _row("sent over links", sent, _known_bytes, _ratio)


def _lanes(lines: Sequence[Timeline], heads: Row) -> Table:
    """Return a row per lane of any timeline: its bubble, and its device's memory."""
    is_bytes = any(map(knows_bytes, lines))
    text = _known_bytes if is_bytes else short
    amounts = {"peak bytes of tensors": peak_bytes} if is_bytes else _ALIVE
    head = [f"{what}, {name}" for what in ("bubble", *amounts) for name in heads]
    devices = {lane.label: lane.device for x in lines for lane in x.schedule.lanes}
    bubbles = [
        {
            lane.label: x.lane_bubble_fraction(i)
            for i, lane in enumerate(x.schedule.lanes)
        }
        for x in lines
    ]
    peaks = [[dict(enumerate(of(x))) for x in lines] for of in amounts.values()]
    rows = []
    for label, device in devices.items():
        row = _row(label, [of.get(label) for of in bubbles], percent, _points)
        for each in peaks:
            row += _row("", [of.get(device) for of in each], text, _ratio)[1:]
        rows.append(row)
    return Table("Each lane", ("lane", *head), tuple(rows), is_open=len(rows) <= 8)


def _row(
    name: str,
    amounts: Sequence[float | None],
    text: Callable[[float], str],
    difference: Callable[[float, float], str],
) -> Row:
    texts = ["–" if amount is None else text(amount) for amount in amounts]
    if len(amounts) != 2:
        return (name, *texts)
    first, second = amounts
    if first is None or second is None or "–" in texts:
        return (name, *texts, "–")
    return (name, *texts, difference(first, second))


def _known_bytes(amount: float) -> str:
    return byte_size(amount) if amount else "–"


def _ratio(first: float, second: float) -> str:
    if not first:
        return "–"
    return _signed(100 * (second / first - 1), "%")


def _points(first: float, second: float) -> str:
    return _signed(100 * (second - first), "points")


def _signed(number: float, unit: str) -> str:
    text = f"{number:+.1f}".replace("-", "−")
    return f"0 {unit}" if text in ("+0.0", "−0.0") else f"{text} {unit}"


def to_html(
    timelines: Timeline | Sequence[Titled],
    title: str = "timeline",
    *,
    summary: str = "",
    samples_per_step: float | None = None,
    leading: Sequence[Table] = (),
    tables: Sequence[Table] = (),
    charts: Sequence[Chart] = (),
    figures: Sequence[Figure] = (),
    facts: Sequence[Facts] = (),
    meanings: Mapping[str, str] | None = None,
    advised: Sequence[str] | None = None,
) -> str:
    """Draw timelines one above the other on one time axis, to zoom and to point at.

    Args:
        timelines: a timeline, or `(title, timeline)` pairs such as "predicted" and
            "measured"; the tables compare two.
        title: the page's title.
        summary: a line below the title, before the programs' sizes.
        samples_per_step: if given, there is a row of samples per second.
        leading: tables above everything else.
        tables: further tables, below the numbers of the timelines.
        charts: quantities over steps, such as the loss.
        figures: other pictures.
        facts: sections to fold out.
        meanings: explains further names of rows and columns, on hover.
        advised: what would shorten a step; what the last timeline says if not given.

    Raises:
        PlanError: no timeline was given.
    """
    panels = as_panels(timelines)
    wheres = [Where.of(timeline) for _, timeline in panels]
    whole, each = number_tables(panels, samples_per_step)
    whose = f"{panels[-1][0]}: " if panels[1:] and panels[-1][0] else ""
    return _page(
        title,
        "; ".join((*filter(None, [summary]), *_sizes(panels))),
        whole=whole,
        idle=idle_table(panels, wheres),
        advice=[whose + x for x in advice(wheres[-1])] if advised is None else advised,
        meanings={**MEANINGS, **(meanings or {})},
        each=each,
        leading=leading,
        tables=tables,
        panels=[panel_title or line.origin.value for panel_title, line in panels],
        charts=charts,
        figures=figures,
        facts=facts,
        data=page_data(panels, wheres, charts),
        script="\n".join(_asset(name) for name in _SCRIPTS),
    )


def still_page(
    title: str,
    summary: str,
    numbers: Table,
    *,
    figures: Sequence[Figure],
    tables: Sequence[Table] = (),
) -> str:
    """Return a page of tables and figures in the same style, without a script.

    Args:
        title: the page's title.
        summary: a sentence or two below the title.
        numbers: the table above the figures.
        figures: pictures.
        tables: further tables, below them.
    """
    return _page(title, summary, whole=numbers, figures=figures, tables=tables)


def _page(title: str, summary: str, **parts: object) -> str:
    """Fill in the page; what is not given is empty."""
    empty = dict.fromkeys(("leading", "tables", "panels", "charts", "facts"), ())
    return template("page.html").render(
        {"idle": None, "each": None, "advice": (), "meanings": {}, **empty, **parts},
        title=title,
        summary=summary,
        style=_asset("style.css"),
    )


def _sizes(timelines: Sequence[Titled]) -> Iterator[str]:
    """Yield the sizes that all have, or each one's behind its title."""
    sizes = {title: sizes_text(line.schedule.program) for title, line in timelines}
    if len(set(sizes.values())) == 1:
        sizes = {"": next(iter(sizes.values()))}
    yield from (f"{title}: {text}".removeprefix(": ") for title, text in sizes.items())


def _asset(name: str, package: str = __package__) -> str:
    return (files(package) / name).read_text(encoding="utf-8")


@cache
def template(name: str, package: str = __package__) -> Template:
    """Return a template of HTML or SVG, which escapes what is filled in.

    `light` and `dark` are the variables of a theme's colours, as CSS.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {x.value: surface_variables(x) for x in Theme}
    return environment.from_string(_asset(name, package))


# What notebooks show: HTML without scripts, with its own background.
#
# 1. Text or a table.
# 2. Lanes, as SVG; as text where there are more ops than a notebook should hold.
# 3. Idle time by cause.
#
# A notebook holds several outputs: CSS is scoped to a class per output.
_MOST_OPS: Final = 4000  # an op takes about 250 bytes of SVG, and a notebook keeps them
_STYLE: Final = Style(width=900.0, show_memory=False)
_EQUAL: Final = "simulated on equal devices: forward 1 s, backward 2 s, messages 0 s"


def html_of(drawn: Schedule | Timeline) -> str:
    """Return the HTML of a timeline; of a schedule, as equal devices would play it."""
    if isinstance(drawn, Timeline):
        return html_card(drawn, title=drawn.origin.value)
    return html_card(simulate(drawn, Costs.uniform()), title=_EQUAL)


def html_card(
    timeline: Timeline | None,
    *,
    title: str = "",
    text: str = "",
    table: Table | None = None,
) -> str:
    """Return a piece of HTML that needs nothing else, and changes nothing around it.

    Args:
        timeline: drawn, with its idle time by cause below; None for no picture.
        title: above the picture.
        text: above that, set as it is, in a fixed-width font.
        table: below the text; its note follows it.
    """
    parts = {"text": text, "table": table, "note": table.note if table else ""}
    svg, lanes, idle = "", "", ""
    scope = "hocket-" + sha256(repr(parts).encode()).hexdigest()[:8]
    if timeline is not None:
        idle = f"idle: {idle_line(idle_by_cause(timeline))}"
        if timeline.schedule.num_ops > _MOST_OPS:
            lanes = f"{title}\n{to_text(timeline, width=120)}"
        else:
            scene = lay_out([(title, timeline)], style=_STYLE)
            scope = "hocket-" + sha256(f"{scope}{scene}".encode()).hexdigest()[:8]
            svg = svg_of(scene, scope=f".{scope} ")
    return template("card.html").render(
        parts, scope=scope, svg=svg, lanes=lanes, idle=idle
    )
