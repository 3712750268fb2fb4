"""The page of a plan: every candidate a point, and nothing loaded from elsewhere."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from hocket.errors import PlanError
from hocket.planner.rank import Search, rank
from hocket.planner.ranking.report import to_html, to_svg
from tests.planner.toys import EVERYTHING, MIB, cluster, ranked, work

pytestmark = pytest.mark.xdist_group("rankings")  # in one process, which keeps them

SVG = "{http://www.w3.org/2000/svg}"


def test_every_candidate_is_a_point() -> None:
    """Circles are pipelines, squares data parallelism, and one ring is the best."""
    ranking = ranked(work(8), cluster(4), 16, EVERYTHING)
    picture = ElementTree.fromstring(to_svg(ranking))
    circles = [
        x for x in picture.iter(f"{SVG}circle") if x.find(f"{SVG}title") is not None
    ]
    squares = list(picture.iter(f"{SVG}rect"))
    is_plain = [x.candidate.is_data_parallel for x in ranking.outcomes]
    assert len(squares) == sum(is_plain)
    assert len(circles) == len(is_plain) - sum(is_plain)
    rings = [x for x in picture.iter(f"{SVG}circle") if x.get("r") == "9"]
    assert len(rings) == 1


def test_what_does_not_fit_is_hollow_and_beyond_the_line() -> None:
    """To the right of the budget, and never to its left."""
    ranking = rank(
        work(8, activation_bytes=64 * MIB),
        cluster(4, memory_bytes=900 * MIB),
        16,
        EVERYTHING,
    )
    assert ranking.fitting
    assert ranking.too_large
    picture = ElementTree.fromstring(to_svg(ranking))
    budget = next(
        float(x.get("x1", ""))
        for x in picture.iter(f"{SVG}line")
        if x.get("stroke-dasharray")
    )
    for point in picture.iter(f"{SVG}circle"):
        if point.find(f"{SVG}title") is not None:
            is_hollow = point.get("fill") == "none"
            assert is_hollow == (float(point.get("cx", "")) > budget + 0.05)


def test_a_far_budget_leaves_the_points_their_room() -> None:
    """A gigabyte available and a few megabytes taken: said in words, without a line."""
    ranking = rank(work(8), cluster(4, memory_bytes=1 << 50), 16)
    picture = ElementTree.fromstring(to_svg(ranking))
    assert not [x for x in picture.iter(f"{SVG}line") if x.get("stroke-dasharray")]
    assert any("to have" in (x.text or "") for x in picture.iter(f"{SVG}text"))


def test_the_page_holds_the_choice_and_escapes_names() -> None:
    """A model's name is text, whatever is in it."""
    from dataclasses import replace

    job = replace(work(8), name="<script>alert(1)</script>")
    page = to_html(rank(job, cluster(4), 16))
    assert "<script>alert" not in page
    assert "best: " in page
    assert "Memory of the best" in page


def test_columns_explain_themselves() -> None:
    """Those whose names are not plain; a pointer or a tap on the head shows it."""
    page = to_html(ranked(work(8), cluster(4), 16, EVERYTHING))
    terms = re.findall(r'<th scope="col"><span class="term"[^>]*>([^<]*)<', page)
    assert {"layout", "microbatches", "bubble", "limited by", "gap"} <= set(terms)


def test_a_notebook_shows_the_table_and_the_best() -> None:
    """The rows of the terminal's table, and a step; or why there is none."""
    ranking = ranked(work(8), cluster(4), 16, EVERYTHING)
    html = ranking._repr_html_()
    assert html.count("<tr>") == 1 + len(ranking.rows())
    assert "&gt; best: of all within 1 %" in html
    assert "<svg" in html
    chosen = ranking.best.candidate if ranking.best else None
    assert chosen is not None
    assert f"best {chosen.schedule} {chosen.num_devices}x" in repr(ranking)
    assert len(repr(ranking)) < 200

    nothing = rank(work(8), cluster(2, memory_bytes=1 * MIB), 16)
    assert "Nothing fits" in nothing._repr_html_()
    assert "nothing fits" in repr(nothing)


def test_without_anything_that_fits_there_is_no_page() -> None:
    """The error says what misses least."""
    with pytest.raises(PlanError, match="Nothing fits"):
        to_html(ranked(work(8), cluster(2, memory_bytes=MIB), 8, Search()))
