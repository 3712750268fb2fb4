"""What notebooks show of objects: one line, and HTML that stands on its own."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

import hocket
from hocket.core.schedule import Schedule
from hocket.core.timelines.timeline import Timeline
from hocket.draw.html.page import html_card
from tests.draw.test_svg import NAMESPACE, ops_of
from tests.draw.timelines import REAL, measured, simulated


def svg_in(html: str) -> str:
    """The picture in a piece of HTML."""
    return html[html.index("<svg") : html.index("</svg>") + 6]


def html_of(shown: Schedule | Timeline) -> str:
    """What a notebook asks for."""
    return shown._repr_html_()


def test_a_timeline_shows_its_lanes_and_why_they_are_idle() -> None:
    """Every op is drawn, as in the picture of the same timeline."""
    timeline = measured(simulated("1f1b", 2, 4, costs=REAL))
    html = html_of(timeline)

    assert len(ops_of(svg_in(html))) == timeline.schedule.num_ops
    assert "measured" in html
    assert "idle: imbalance" in html or "idle: warm-up and drain" in html


def test_a_schedule_is_shown_as_equal_devices_play_it() -> None:
    """The picture of the simulation whose numbers the title names."""
    schedule = hocket.make_schedule("zb-h1", num_devices=2, num_microbatches=4)
    texts = ET.fromstring(svg_in(html_of(schedule))).iter(f"{NAMESPACE}text")
    equal = hocket.simulate(schedule, hocket.Costs.uniform())

    written = [text.text or "" for text in texts]
    assert "simulated on equal devices: forward 1 s, backward 2 s, messages 0 s" in (
        written
    )
    assert any(text.startswith(f"{equal.makespan_s:g} s, ") for text in written)


def test_a_cell_needs_nothing_and_changes_nothing_around_it() -> None:
    """No script, no address to load from; and all its style names its own `div`."""
    first, second = (html_of(simulated("1f1b", 2, m, costs=REAL)) for m in (3, 4))
    scopes = set()
    for html in (first, second):
        assert "<script" not in html
        assert html.count("://") == html.count("http://www.w3.org/2000/svg") == 1
        (scope,) = re.findall(r'<div class="(hocket-\w+)">', html)
        scopes.add(scope)
        styles = "".join(re.findall(r"<style>(.*?)</style>", html, re.DOTALL))
        selectors = ",".join(re.findall(r"([^{}]+)\{[^{}]*\}", styles)).split(",")
        assert len(selectors) > 20
        assert {one.split()[0] for one in selectors} == {f".{scope}"}
    assert len(scopes) == 2


def test_a_notebook_does_not_swell_with_long_timelines() -> None:
    """From thousands of ops on, lanes are text."""
    html = html_of(simulated("1f1b", 8, 64, num_steps=5))

    assert "<svg" not in html
    assert "d7" in html
    assert len(html) < 20_000


def test_text_is_no_markup() -> None:
    """Names of models and layers come from their users."""
    html = html_card(None, text="<b>a & b</b>")

    assert "&lt;b&gt;a &amp; b&lt;/b&gt;" in html


@pytest.mark.parametrize("num_microbatches", [2, 64])
def test_repr_is_one_line(num_microbatches: int) -> None:
    """However many ops there are."""
    timeline = simulated("1f1b", 2, num_microbatches, costs=REAL)

    for shown in (timeline, timeline.schedule):
        assert "\n" not in repr(shown)
        assert len(repr(shown)) < 200
        assert f"num_microbatches={num_microbatches}" in repr(shown)
