"""Draw timelines as one self-contained HTML page, which loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from hocket.core.timelines.timeline import Timeline
from hocket.draw.html.content import Chart, Facts, Figure, Table
from hocket.draw.html.data import page_data, surface_variables
from hocket.draw.html.numbers import MEANINGS, idle_table, number_tables
from hocket.draw.layout import Titled, as_panels
from hocket.draw.palette import Theme
from hocket.draw.quantity import counted
from hocket.draw.summary import num_microbatches_text
from hocket.draw.where import Where, advice

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
) -> str:
    """Draw timelines one above the other on one time axis, to zoom and to point at.

    Args:
        timelines: a timeline, or `(title, timeline)` pairs such as "predicted" and
            "measured"; the tables compare two.
        title: the page's title.
        summary: lines below the title; by default the program's sizes.
        samples_per_step: turns steps per second into samples per second.
        leading: tables above everything else.
        tables: further tables, below the numbers of the timelines.
        charts: quantities over steps, such as the loss.
        figures: other pictures.
        facts: sections to fold out.
        meanings: explains further names of rows and columns, on hover.

    Raises:
        PlanError: no timeline was given.
    """
    panels = as_panels(timelines)
    wheres = [Where.of(timeline) for _, timeline in panels]
    whole, each = number_tables(panels, samples_per_step)
    return _template().render(
        title=title,
        summary=summary or _sizes(panels[0][1]),
        whole=whole,
        idle=idle_table(panels, wheres),
        advice=advice(wheres[-1]),
        meanings={**MEANINGS, **(meanings or {})},
        each=each,
        leading=leading,
        tables=tables,
        panels=[panel_title or line.origin.value for panel_title, line in panels],
        charts=charts,
        figures=figures,
        facts=facts,
        data=page_data(panels, wheres, charts),
        light=surface_variables(Theme.LIGHT),
        dark=surface_variables(Theme.DARK),
        style=_asset("style.css"),
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
    return _template().render(
        title=title,
        summary=summary,
        leading=(),
        whole=numbers,
        idle=None,
        advice=(),
        meanings={},
        each=None,
        tables=tables,
        panels=(),
        charts=(),
        figures=figures,
        facts=(),
        light=surface_variables(Theme.LIGHT),
        dark=surface_variables(Theme.DARK),
        style=_asset("style.css"),
    )


def _sizes(timeline: Timeline) -> str:
    program = timeline.schedule.program
    counts: list[tuple[int | str, str]] = [
        (program.num_devices, "device"),
        (program.num_stages, "stage"),
        (num_microbatches_text(program), "microbatch"),
        (program.num_steps, "step"),
    ]
    return ", ".join(counted(count, noun) for count, noun in counts)


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_asset("page.html"))
