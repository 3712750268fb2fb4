"""Draws what notebooks show: HTML without scripts, with its own background.

1. Text or a table.
2. Lanes, as SVG; as text where there are more ops than a notebook should hold.
3. Idle time by cause.

A notebook holds several outputs: CSS is scoped to a class per output.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from hocket.core.costs import Costs
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.idle import idle_by_cause
from hocket.core.timelines.timeline import Timeline
from hocket.draw.html.content import Table
from hocket.draw.html.data import surface_variables
from hocket.draw.layout import Style, lay_out
from hocket.draw.palette import Theme
from hocket.draw.svg import svg_of
from hocket.draw.text import to_text
from hocket.draw.where import idle_line

if TYPE_CHECKING:
    from jinja2 import Template

_MOST_OPS: Final = 4000  # an op takes about 250 bytes of SVG, and a notebook keeps them
_STYLE: Final = Style(width=900.0, show_memory=False)
_EQUAL: Final = "simulated on equal devices: forward 1 s, backward 2 s, messages 0 s"

# Notebooks colour tables for their own background: `!important` keeps ours readable.
_CARD: Final = """\
<div class="{{ scope }}">
<style>
.{{ scope }} { {{ light }} }
@media (prefers-color-scheme: dark) { .{{ scope }} { {{ dark }} } }
.{{ scope }} { background: var(--page); color: var(--ink); overflow-x: auto;
  padding: 12px 20px; max-width: 940px; font: 13px/1.5 sans-serif }
.{{ scope }} svg { display: block; margin: -8px -20px; max-width: calc(100% + 40px);
  height: auto }
.{{ scope }} pre { background: none !important; color: inherit !important; margin: 0;
  font: 12px/1.45 monospace; white-space: pre }
.{{ scope }} p { margin: 6px 0; color: var(--muted); white-space: pre-line }
.{{ scope }} table { border-collapse: collapse; margin: 6px 0 }
.{{ scope }} tr, .{{ scope }} th, .{{ scope }} td {
  background: none !important; color: inherit !important; border: 0;
  padding: 2px 14px 2px 0; font: inherit; text-align: right; white-space: nowrap }
.{{ scope }} td:first-child, .{{ scope }} th:first-child { text-align: left }
.{{ scope }} thead { border-bottom: 1px solid var(--grid) }
</style>
{% if text %}
<pre>{{ text }}</pre>
{% endif %}
{% if table %}
<table>
<thead><tr>{% for cell in table.head %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
{% endif %}
{% if note %}
<p>{{ note }}</p>
{% endif %}
{{ svg | safe }}
{% if lanes %}
<pre>{{ lanes }}</pre>
{% endif %}
{% if idle %}
<p>{{ idle }}</p>
{% endif %}
</div>
"""


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
    return _template().render(
        parts,
        scope=scope,
        light=surface_variables(Theme.LIGHT),
        dark=surface_variables(Theme.DARK),
        svg=svg,
        lanes=lanes,
        idle=idle,
    )


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_CARD)
