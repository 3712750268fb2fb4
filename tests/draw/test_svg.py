"""Pictures as SVG."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.timelines.timeline import Timeline
from hocket.draw.layout import Style
from hocket.draw.palette import Theme
from hocket.draw.svg import to_svg
from hocket.errors import PlanError
from tests.draw.timelines import REAL, measured, simulated, teacher_and_student

NAMESPACE = "{http://www.w3.org/2000/svg}"


def ops_of(svg: str) -> list[tuple[str, float, float]]:
    """Text, left and width of each op in a picture."""
    boxes = []
    for rect in ET.fromstring(svg).iter(f"{NAMESPACE}rect"):
        hint = rect.find(f"{NAMESPACE}title")
        if hint is not None and hint.text:
            place = float(rect.attrib["x"]), float(rect.attrib["width"])
            boxes.append((hint.text.split()[0], *place))
    return boxes


def texts_of(svg: str) -> list[str]:
    """Every text in a picture."""
    return [text.text or "" for text in ET.fromstring(svg).iter(f"{NAMESPACE}text")]


@given(p=st.integers(1, 4), m=st.integers(1, 6), steps=st.integers(1, 3))
def test_every_op_that_takes_time_is_drawn_at_its_time(
    p: int, m: int, steps: int
) -> None:
    """One box per span, in proportion, up to the hairline between neighbours."""
    timeline = measured(simulated("1f1b", p, m, num_steps=steps, costs=REAL))
    boxes = ops_of(to_svg(timeline))
    spans = [span for span in timeline.spans if span.end_s > span.start_s]

    assert [text for text, _, _ in boxes] == [str(span.op) for span in spans]
    left = min(x for _, x, _ in boxes)
    scale = (960 - 20 - 50 - left) / timeline.makespan_s
    for (_, x, width), span in zip(boxes, spans, strict=True):
        assert x == pytest.approx(
            left + (span.start_s - timeline.begin_s) * scale, abs=0.01
        )
        assert 0 <= (span.end_s - span.start_s) * scale - width <= 0.8


def test_numbers_of_the_timeline_stand_beside_it() -> None:
    """The bubble that the simulator says: (p - 1) / (m + p - 1) of 1F1B."""
    texts = texts_of(to_svg(simulated("1f1b", 4, 8)))

    assert "33 s, bubble 27.3 %, steady 0 %" in texts
    assert texts.count("27.3 %") == 4
    assert {"d0", "d1", "d2", "d3", "forward", "backward"} <= set(texts)
    assert "update" not in texts  # it takes no time, so it is not seen


def test_microbatches_are_numbered_where_they_fit() -> None:
    """Eight microbatches can be read; of a thousand none is written over another."""
    few, many = (texts_of(to_svg(simulated("gpipe", 2, m))) for m in (8, 1000))

    assert few.count("7") == 2 * 2
    assert len(many) < 60


def test_titles_and_names_are_escaped() -> None:
    """A model may be called what it likes."""
    svg = to_svg([("<b>&", teacher_and_student())], title='"<script>alert(1)</script>')

    assert "<script" not in svg
    assert "<b>&" in texts_of(svg)


def test_several_timelines_share_one_axis() -> None:
    """The same second stands at the same place in each."""
    fast, slow = simulated("1f1b", 2, 4), simulated("1f1b", 4, 8)
    alone = {text: x for text, x, _ in ops_of(to_svg([("fast", fast), ("slow", slow)]))}
    below = {text: x for text, x, _ in ops_of(to_svg(slow))}

    assert alone["3B7"] == below["3B7"]


def test_what_is_not_asked_for_is_not_drawn() -> None:
    """Memory and the legend can be left out, messages are extra."""
    timeline = simulated("1f1b", 4, 8, message_s=0.1)
    bare = to_svg(timeline, style=Style(show_memory=False, show_legend=False))
    full = to_svg(timeline, style=Style(show_transfers=True))

    assert "polygon" not in bare
    assert "forward" not in texts_of(bare)
    num_lines = full.count("<polyline") - to_svg(timeline).count("<polyline")
    assert num_lines == 2 * 3 * 8


def test_a_theme_is_fixed_or_follows_the_reader() -> None:
    """A picture without a theme holds both themes."""
    timeline = simulated("1f1b", 2, 2)

    assert "prefers-color-scheme:dark" in to_svg(timeline)
    dark = to_svg(timeline, theme=Theme.DARK)
    assert "prefers-color-scheme" not in dark
    assert "#14181D" in dark


def test_bytes_are_drawn_where_they_are_known() -> None:
    """In the unit that fits; otherwise microbatches are counted."""
    known, unknown = simulated("1f1b", 2, 4, costs=REAL), simulated("1f1b", 2, 4)

    assert "memory, MiB" in texts_of(to_svg(known))
    assert "activations alive, in microbatches" in texts_of(to_svg(unknown))


@pytest.mark.parametrize("timelines", [[], ()])
def test_no_timeline_is_an_error(timelines: list[tuple[str, Timeline]]) -> None:
    """An empty list of timelines is refused."""
    with pytest.raises(PlanError, match="no timeline"):
        to_svg(timelines)


def test_a_page_without_room_is_an_error() -> None:
    """The error names the width that the page needs, and that width works."""
    timeline = simulated("1f1b", 2, 2)
    with pytest.raises(PlanError, match="at least") as caught:
        to_svg(timeline, style=Style(width=50))
    least = float(str(caught.value).split("at least ")[1].split()[0])

    assert ops_of(to_svg(timeline, style=Style(width=least)))
