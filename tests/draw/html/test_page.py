"""The page of timelines, as text: what is in it, and that nothing breaks out of it."""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import Any

import pytest

from hocket.core.timelines.timeline import Timeline
from hocket.draw.html import Chart, Facts, Line, Table, to_html
from hocket.errors import PlanError
from tests.draw.timelines import REAL, measured, simulated, teacher_and_student

EVIL = "</script><script>alert(1)</script><b>&\"'"


def data_of(page: str) -> dict[str, Any]:
    """What the page's script reads."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def rows_of(page: str) -> list[list[str]]:
    """The cells of every table row of a page, in order."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
    return [[re.sub(r"</?span[^>]*>", "", text) for text in row] for row in cells]


def predicted_and_measured() -> list[tuple[str, Timeline]]:
    """Two steps of a real size on replicas."""
    timeline = simulated(
        "1f1b", 4, 8, num_steps=2, num_replicas=2, costs=REAL, message_s=2e-4
    )
    return [("predicted", timeline), ("measured", measured(timeline))]


def test_spans_are_written_exactly_enough() -> None:
    """Gaps and durations add up to every start and end, to 1e-7 of the makespan."""
    timelines = predicted_and_measured()
    for panel, (_, timeline) in zip(
        data_of(to_html(timelines))["panels"], timelines, strict=True
    ):
        near = timeline.makespan_s * 1e-7
        for i, lane in enumerate(panel["lanes"]):
            pairs = zip(lane["gap"], lane["duration"], strict=True)
            edges = list(accumulate(number for pair in pairs for number in pair))
            starts = [edge * panel["tick"] for edge in edges[::2]]
            ends = [edge * panel["tick"] for edge in edges[1::2]]
            begin_s = timeline.begin_s
            assert starts == pytest.approx(timeline.start_s[i] - begin_s, abs=near)
            assert ends == pytest.approx(timeline.end_s[i] - begin_s, abs=near)


def test_two_timelines_are_compared() -> None:
    """The measured one is 5 % slower, and its bubble is the same."""
    rows = {row[0]: row[1:] for row in rows_of(to_html(predicted_and_measured()))}

    assert rows[""] == ["predicted", "measured", "difference"]
    assert rows["makespan"][2] == "+5.0 %"
    assert "samples/s of a step" not in rows
    assert rows["bubble"][2] == "0 points"
    assert rows["peak bytes of tensors"][2] == "0 %"
    assert len(rows["d0"]) == 6


def test_one_timeline_is_shown_and_not_compared() -> None:
    """A timeline without bytes shows activations."""
    rows = {row[0]: row[1:] for row in rows_of(to_html(simulated("1f1b", 4, 8)))}

    assert rows["bubble"] == ["27.3 %"]
    assert rows["peak microbatches, F to W"] == ["4"]
    assert rows["peak activations, F to I"] == ["4"]
    assert rows["d0"] == ["27.3 %", "4", "4"]
    assert "peak bytes of tensors" not in rows


def test_a_page_says_what_the_terminal_says() -> None:
    """ZB-H1: 4 from F to W on each device; 4, 3, 2, 1 from F to I."""
    rows = {row[0]: row[1:] for row in rows_of(to_html(simulated("zb-h1", 4, 8)))}

    assert [rows[f"d{i}"][1:] for i in range(4)] == [["4", x] for x in "4321"]


def test_timelines_of_different_lanes_can_be_compared() -> None:
    """A lane that only one of them has is left blank in the other."""
    page = to_html([("a", simulated("1f1b", 2, 4)), ("b", simulated("1f1b", 3, 4))])
    rows = {row[0]: row[1:] for row in rows_of(page)}

    assert list(rows)[-3:] == ["d0", "d1", "d2"]
    assert rows["d2"][0] == "–"
    assert rows["d2"][2] == "–"


def test_samples_make_a_throughput() -> None:
    """64 samples in the 33 seconds of a step."""
    page = to_html(simulated("1f1b", 4, 8), "run", samples_per_step=64)
    rows = {row[0]: row[1:] for row in rows_of(page)}

    assert rows["samples/s of a step"] == ["1.939"]


def test_nothing_breaks_out_of_the_page() -> None:
    """Titles, tables, charts and facts may hold any text."""
    line = Line(EVIL, (0.0, 1.0), (2.0, float("nan")))
    page = to_html(
        [(EVIL, teacher_and_student())],
        EVIL,
        summary=EVIL,
        tables=[Table(EVIL, (EVIL,), ((EVIL,),))],
        charts=[Chart(EVIL, (line,))],
        facts=[Facts(EVIL, ((EVIL, EVIL),), EVIL)],
    )

    assert "alert(1)</script>" not in page
    assert "<b>&\"'" not in page
    data = data_of(page)
    assert data["panels"][0]["title"] == EVIL
    assert data["charts"][0]["lines"][0]["values"] == [2.0, None]


def test_nothing_is_loaded() -> None:
    """No address but a namespace, and a policy that forbids every other source."""
    page = to_html(simulated("1f1b", 2, 2))
    addresses = set(re.findall(r"https?://[^\"'\s<)]+", page))

    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page


def test_a_page_of_20_000_spans_is_small() -> None:
    """Two megabytes, so that it opens at once and can be sent."""
    timeline = simulated("1f1b", 16, 64, num_steps=10, costs=REAL)

    assert timeline.schedule.num_ops > 20_000
    assert len(to_html(timeline)) < 2_000_000


def test_tables_and_lines_refuse_what_does_not_fit() -> None:
    """A row too long, a value too few: with the numbers."""
    with pytest.raises(PlanError, match="2 columns, and a row of 1"):
        Table("t", ("a", "b"), (("1",),))
    with pytest.raises(PlanError, match="2 steps and 1 values"):
        Line("loss", (0, 1), (0.5,))


def test_no_timeline_is_an_error() -> None:
    """A page without one has nothing to say."""
    with pytest.raises(PlanError, match="no timeline"):
        to_html([])


def test_advice_of_several_timelines_names_the_one_it_is_of() -> None:
    """The last one; nothing said so, below a table of three."""
    runs = [(name, simulated(name, 4, 8)) for name in ("zb-h1", "gpipe", "1f1b")]
    (advice,) = re.findall(r'<ul class="advice">(.*?)</ul>', to_html(runs), re.DOTALL)
    lines = re.findall(r"<li>(.*?)</li>", advice)
    assert lines
    assert all(line.startswith("1f1b: ") for line in lines)
    alone = to_html(runs[-1][1])
    assert all(f"<li>{line.removeprefix('1f1b: ')}</li>" in alone for line in lines)
