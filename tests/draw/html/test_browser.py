"""The page in headless Chromium: it draws, answers to the reader, and is quick."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hocket.core.timelines.timeline import Timeline
from hocket.draw.html import Chart, Facts, Line, Table, to_html
from hocket.draw.html.page import html_card
from tests.draw.chromium import Page, find, running
from tests.draw.timelines import REAL, measured, simulated

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find() is None, reason="there is no Chromium here"),
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One browser for all tests of this file."""
    program = find()
    assert program is not None
    with running(program, tmp_path_factory.mktemp("chromium") / "profile") as page:
        yield page


def two_steps() -> list[tuple[str, Timeline]]:
    """A predicted and a measured timeline of two steps."""
    timeline = simulated("1f1b", 4, 8, num_steps=2, costs=REAL, message_s=2e-4)
    return [("predicted", timeline), ("measured", measured(timeline))]


@pytest.fixture
def report(browser: Page, tmp_path: Path) -> Page:
    """The report of a run, opened in a window of 1280 by 900."""
    steps = tuple(float(step) for step in range(100))
    charts = [
        Chart(
            "Loss",
            (
                Line("train", steps, tuple(2.0 / (1 + step) for step in steps)),
                Line("test", (49.0, 99.0), (0.5, 0.25), is_evaluation=True),
            ),
        ),
        Chart("Not a number", (Line("loss", (0.0,), (float("nan"),)),)),
    ]
    facts = [Facts("Recipe", text="[model]\nwidth = 64")]
    page = to_html(two_steps(), "digits", charts=charts, facts=facts)
    return opened(browser, page, tmp_path)


def opened(browser: Page, page: str, folder: Path, *, dark: bool = False) -> Page:
    """A page written to a file, and opened from there."""
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    browser.complaints.clear()
    browser.open(path.as_uri(), width=1280, height=900, dark=dark)
    return browser


def source_line_of(page: Page, panel: int, lane: int, op: int) -> tuple[float, float]:
    """The middle of an op in the window, found from the page's own numbers."""
    x, y = page.evaluate(
        f"""(() => {{
          const marks = document.querySelectorAll(".marks")[{panel}];
          marks.scrollIntoView({{ block: "center" }});
          const box = marks.getBoundingClientRect();
          const {{ view, panels, places }} = hocket;
          const {{ start, end }} = panels[{panel}].lanes[{lane}].ops;
          const place = places[{panel}];
          const time = (start[{op}] + end[{op}]) / 2;
          return [box.left + place.x(view, time), box.top + place.laneY({lane}) + 8];
        }})()"""
    )
    return x, y


def view_of(page: Page) -> list[float]:
    """From when to when the page shows."""
    view: list[float] = page.evaluate("[hocket.view.from, hocket.view.to]")
    return view


def num_colours(page: Page, canvas: str) -> int:
    """How many colours a canvas shows."""
    number: int = page.evaluate(
        f"""(() => {{
          const canvas = document.querySelector("{canvas}");
          const context = canvas.getContext("2d", {{ willReadFrequently: true }});
          const {{ data }} = context.getImageData(0, 0, canvas.width, canvas.height);
          return new Set(new Uint32Array(data.buffer)).size;
        }})()"""
    )
    return number


def test_it_loads_and_draws_without_a_complaint(report: Page) -> None:
    """From a file, with its policy in force; no canvas is blank."""
    assert report.complaints == []
    assert num_colours(report, ".picture") > 10
    assert num_colours(report, ".overview canvas") > 3
    assert report.evaluate("document.querySelectorAll('.plot path').length") == 2
    assert report.evaluate("document.querySelectorAll('.plot circle').length") == 2


def test_dark_readers_get_a_dark_page(browser: Page, tmp_path: Path) -> None:
    """The page, and what is painted on it."""
    page = opened(browser, to_html(two_steps()), tmp_path, dark=True)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")

    assert ground == "rgb(20, 24, 29)"
    assert num_colours(page, ".picture") > 10


def test_pointing_at_an_op_shows_it(report: Page) -> None:
    """Its name, lane, start and duration, its messages, and the other timeline's."""
    x, y = source_line_of(report, 1, lane=1, op=0)
    report.mouse("mouseMoved", x, y)
    words = report.evaluate("document.getElementById('tip').innerText").split("\n")

    assert words[0] == "1F0"
    assert "forward, stage 1, microbatch 0, step 0" in words
    for word in ("lane", "start", "duration", "predicted", "from d0", "to d2"):
        assert word in words
    assert "3 ms (here +5.0 %)" in words


def test_pointing_at_the_bubble_shows_how_long_and_why(report: Page) -> None:
    """Lane d3 waits for the first microbatch."""
    x, y = source_line_of(report, 0, lane=3, op=0)
    left, _ = source_line_of(report, 0, lane=0, op=0)
    report.mouse("mouseMoved", (x + left) / 2, y)
    words = report.evaluate("document.getElementById('tip').innerText").split("\n")

    assert words[0] == "d3 waits"
    assert "3F0" in words


def test_the_wheel_zooms_where_the_pointer_is(report: Page) -> None:
    """The time under the pointer stays there; zooming out shows all again."""
    x, y = source_line_of(report, 0, lane=0, op=3)
    whole = view_of(report)
    report.mouse("mouseMoved", x - 3, y)
    report.mouse("mouseMoved", x, y)
    report.mouse("mouseWheel", x, y, deltaX=0, deltaY=-400)
    zoomed = view_of(report)

    assert zoomed[1] - zoomed[0] < (whole[1] - whole[0]) / 2
    assert source_line_of(report, 0, lane=0, op=3)[0] == pytest.approx(x, abs=1.5)
    report.mouse("mouseWheel", x, y, deltaX=0, deltaY=4000)
    assert view_of(report) == whole


def test_dragging_zooms_to_the_range(report: Page) -> None:
    """From where it was pressed to where it was let go; a double click shows all."""
    first, y = source_line_of(report, 0, lane=0, op=1)
    last, _ = source_line_of(report, 0, lane=0, op=6)
    report.mouse("mouseMoved", first, y)
    report.mouse("mousePressed", first, y, button="left", clickCount=1)
    report.mouse("mouseMoved", last, y, button="left")
    report.mouse("mouseReleased", last, y, button="left", clickCount=1)
    ops = "hocket.panels[0].lanes[0].ops"
    middle = "(({0}.start[{1}] + {0}.end[{1}]) / 2)".format
    expected = [report.evaluate(middle(ops, i)) for i in (1, 6)]

    assert view_of(report) == pytest.approx(expected, rel=0.02)


def test_keys_zoom_move_and_go_from_op_to_op(report: Page) -> None:
    """All that the pointer can do: and what is pinned is said aloud."""
    whole = view_of(report)
    report.key("+")
    zoomed = view_of(report)
    report.key("ArrowRight")
    moved = view_of(report)
    report.key("0")

    assert whole[0] < zoomed[0] < moved[0]
    assert moved[1] - moved[0] == pytest.approx(zoomed[1] - zoomed[0])
    assert view_of(report) == whole
    report.key("ArrowRight", shift=True)
    report.key("ArrowRight", shift=True)
    assert report.evaluate("document.getElementById('spoken').innerText[2]") == "1"
    report.key("ArrowDown", shift=True)
    spoken = report.evaluate("document.getElementById('spoken').textContent")
    assert spoken.startswith("1F0, forward, stage 1")
    report.key("Escape")
    assert report.evaluate("document.getElementById('tip').hidden")


def test_buttons_go_from_step_to_step(report: Page) -> None:
    """The step that is shown is named."""
    press = "document.querySelector('[data-do={}]').click()".format
    for name, step in (("next", 0), ("next", 1), ("previous", 0)):
        report.evaluate(press(name))
        report.finish_frames()
        label = report.evaluate("document.getElementById('step').textContent")
        assert label == f"step {step}"


def test_charts_show_their_values(report: Page) -> None:
    """The last ones at rest; with the arrow keys, those at each step."""
    readout = "document.querySelector('.readout').textContent"
    assert report.evaluate(readout) == "train 0.02, test 0.25 at step 99"
    report.evaluate("document.querySelector('.plot').focus()")
    report.key("ArrowLeft")
    assert report.evaluate(readout) == "train 0.0202, test 0.5 at step 98"


def test_16_lanes_and_20_000_spans_stay_smooth(browser: Page, tmp_path: Path) -> None:
    """Zooming stays smooth; the test prints a frame's time, and fails for a stall."""
    timeline = simulated("1f1b", 16, 64, num_steps=10, costs=REAL)
    timelines = [("predicted", timeline), ("measured", measured(timeline))]
    page = opened(browser, to_html(timelines), tmp_path)
    frames: list[Any] = page.evaluate(
        """(async () => {
          const times = [];
          for (let i = 0; i < 30; i++) {
            const begin = performance.now();
            hocket.view.zoom(i < 15 ? 1.2 : 1 / 1.2, 0.3 * hocket.view.longest);
            hocket.drawNow();
            times.push(performance.now() - begin);
            await new Promise((done) => requestAnimationFrame(done));
          }
          return times.sort((a, b) => a - b);
        })()"""
    )
    print(f"median frame {frames[15]:.1f} ms, longest {frames[-1]:.1f} ms")

    assert page.complaints == []
    assert frames[15] < 200


def test_a_finger_sees_all_that_a_pointer_sees(report: Page) -> None:
    """A tap shows an op, an idle stretch, memory, a term and the values of a chart."""
    shown = "document.getElementById('tip').hidden ? '' : tip.innerText"
    x, y = source_line_of(report, 1, lane=1, op=0)
    left, _ = source_line_of(report, 1, lane=0, op=0)
    report.tap(x, y)
    assert report.evaluate(shown).startswith("1F0\n")
    report.tap((left + x) / 2, y)
    assert report.evaluate(shown).startswith("d1 waits\n")
    strip = report.evaluate("hocket.places[1].memoryTop - hocket.places[1].laneY(1)")
    report.tap(x, y - 8 + strip + 3)
    assert "memory, device 0" in report.evaluate(shown)

    for words in ("steady bubble", "warm-up and drain"):
        place = report.evaluate(
            f"""(() => {{
              const term = [...document.querySelectorAll(".term")]
                .find((term) => term.textContent === "{words}");
              term.scrollIntoView({{ block: "center" }});
              const {{ left, top }} = term.getBoundingClientRect();
              return [left + 5, top + 5];
            }})()"""
        )
        report.tap(*place)
        assert report.evaluate(shown).startswith(words)

    left, top, width = report.evaluate(
        """(() => {
          const plot = document.querySelector(".plot");
          plot.scrollIntoView({ block: "center" });
          const { left, top, width } = plot.getBoundingClientRect();
          return [left, top, width];
        })()"""
    )
    readout = "document.querySelector('.readout').textContent.split(' ').pop()"
    for look, share in ((report.tap, 0.5), (partial(report.mouse, "mouseMoved"), 0.25)):
        look(left + share * width, top + 40)
        step = 99 * (share * width - 44) / (width - 52)  # less the margins
        assert abs(int(report.evaluate(readout)) - step) <= 1


def test_a_card_of_a_notebook_is_readable_whatever_stands_around_it(
    browser: Page, tmp_path: Path
) -> None:
    """A notebook's own style for tables, on its own ground; and two cards in a page."""
    html = [
        html_card(simulated("zb-h1", 2, 4), table=Table("", ("a", "b"), (("1", "2"),))),
        html_card(simulated("gpipe", 2, 2)),
    ]
    notebook = "<style>body{background:#111;color:#eee}td,th{color:#222}</style>"
    page = opened(browser, f"<!doctype html>{notebook}{''.join(html)}", tmp_path)

    colours = page.evaluate(
        """[...document.querySelectorAll("td, th, p, pre, rect + text")].map((x) => [
          getComputedStyle(x.closest("div")).backgroundColor,
          getComputedStyle(x).color,
        ])"""
    )
    assert {ground for ground, _ in colours} == {"rgb(255, 255, 255)"}
    assert "rgb(238, 238, 238)" not in {ink for _, ink in colours}
    assert "rgb(34, 34, 34)" not in {ink for _, ink in colours}
    forwards = page.evaluate(
        """[...document.querySelectorAll("svg")].map((svg) => {
          const boxes = [...svg.querySelectorAll("rect")];
          const found = boxes.find((box) => box.textContent.includes("forward"));
          return getComputedStyle(found).fill;
        })"""
    )
    assert forwards == ["rgb(63, 114, 190)"] * 2


def test_an_idle_stretch_says_what_it_waits_for(report: Page) -> None:
    """The causes, and for whom; device 2 cannot begin before the first two have."""
    _, y = source_line_of(report, 0, lane=2, op=0)
    left = report.evaluate("hocket.places[0].x(hocket.view, 0)")
    box = report.evaluate(
        "document.querySelectorAll('.marks')[0].getBoundingClientRect().left"
    )
    report.mouse("mouseMoved", box + left + 3, y)
    words = report.evaluate("document.getElementById('tip').innerText").split("\n")

    assert words[0] == "d2 waits"
    assert "warm-up and drain, for d0" in words
    assert "messages, d0 to d1" in words


def test_terms_explain_themselves(report: Page) -> None:
    """Where they are pointed at; and the path can be switched off."""
    report.evaluate(
        "[...document.querySelectorAll('.term')]"
        ".find((term) => term.textContent === 'steady bubble').click()"
    )
    words = report.evaluate("document.getElementById('tip').innerText")
    assert "while the pipeline is full" in words
    before = num_colours(report, ".picture")
    report.evaluate("document.getElementById('show-path').click()")
    report.finish_frames()
    assert num_colours(report, ".picture") < before


def test_a_table_that_scrolls_shows_it(browser: Page, tmp_path: Path) -> None:
    """By a shade where more is, which what is at the end covers; phones show no bar."""
    path = tmp_path / "narrow.html"
    path.write_text(to_html(two_steps(), "digits"))
    browser.open(path.as_uri(), width=360, height=640)
    table = "document.querySelector('.scroll')"
    assert browser.evaluate(f"{table}.scrollWidth > {table}.clientWidth")
    shades = browser.evaluate(f"getComputedStyle({table}).backgroundAttachment")
    assert shades == "local, local, scroll, scroll"
