"""Draws what notebooks show: HTML without scripts, with its own background.

1. Text or a table.
2. Lanes, as SVG; as text where there are more ops than a notebook should hold.
3. Idle time by cause.

A notebook holds several outputs: CSS is scoped to a class per output.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

from hocket.core.costs import Costs
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.idle import idle_by_cause
from hocket.core.timelines.timeline import Timeline
from hocket.draw.html.content import Table
from hocket.draw.html.page import template
from hocket.draw.layout import Style, lay_out
from hocket.draw.svg import svg_of
from hocket.draw.text import to_text
from hocket.draw.where import idle_line

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
        parts,
        scope=scope,
        svg=svg,
        lanes=lanes,
        idle=idle,
    )
