"""The pictures of results: what is kept, for light and dark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import matplotlib as mpl
import pytest

from bench.emulated import picture as emulated
from bench.figures import for_both_themes
from bench.flush_free import picture as flush_free
from bench.wpipe import picture as wpipe
from bench.wpipe.experiments import EXPERIMENTS, results
from bench.wpipe.picture import KEPT
from bench.wpipe.simulate import SIMULATED, row_of

ROOT: Final = Path(__file__).parents[2]
IMAGES: Final = sorted((ROOT / "docs" / "images").glob("*.svg"))
CELL: Final = re.compile(r"^\| ([A-Z][^|]*?) \|(.*)\|[^|]*\|$", re.MULTILINE)
COLUMNS: Final = ("1f1b", "ddp", "wpipe", "wpipe-overlapped")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """What is kept."""
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def drawn_wpipe() -> str:
    """From both files."""
    kept = [json.loads(path.read_text()) for path in (SIMULATED, KEPT)]
    return wpipe.beside_2bw_svg(*kept)


DRAWN: Final[dict[Path, Callable[[], str]]] = {
    wpipe.PICTURE: drawn_wpipe,
    flush_free.PICTURE: lambda: flush_free.steps_and_memory_svg(
        rows_of(flush_free.KEPT)
    ),
    emulated.PICTURE: lambda: emulated.idle_shares_svg(rows_of(emulated.KEPT)),
}


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_a_picture_shows_what_is_kept(path: Path) -> None:
    """If this fails, results are newer: `python -m bench.tables` draws them."""
    kept = path.read_text(encoding="utf-8")
    if f"Matplotlib v{mpl.__version__}," not in kept:
        pytest.skip("drawn by another matplotlib, which may place things otherwise")
    assert DRAWN[path]() == kept


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_every_picture_has_a_dark_side(path: Path) -> None:
    """A white page glares among dark ones; a dark one must still be an SVG."""
    text = path.read_text(encoding="utf-8")

    assert "prefers-color-scheme:dark" in text
    assert ElementTree.fromstring(text).tag.endswith("svg")


def test_colours_change_in_the_dark_alone() -> None:
    """What matplotlib wrote stays, and its rules come first."""
    svg = '<svg><style>*{}</style><path style="fill: #ffffff"/></svg>'
    themed = for_both_themes(svg)
    begin = themed.index("\n@media")
    end = themed.index("</style>")

    assert themed[:begin] + themed[end:] == svg
    assert '[style*="fill: #ffffff"]{fill:#14181D!important}' in themed


def test_the_kept_simulation_is_todays() -> None:
    """Of the experiments that are quick: others rest on the same code."""
    quick = tuple(one for one in EXPERIMENTS if "fine-tuning" in one.name)
    kept = [row for row in rows_of(SIMULATED) if "fine-tuning" in row["experiment"]]
    assert [row_of(result) for result in results(quick)] == kept


def test_the_documentation_has_the_kept_numbers() -> None:
    """Each number of the table of docs/explanation/wpipe.md, to two decimals."""
    page = (ROOT / "docs" / "explanation" / "wpipe.md").read_text(encoding="utf-8")
    reported = {
        name: [cell.strip() for cell in cells.split("|")][:6]
        for name, cells in CELL.findall(page)
        if len(cells.split("|")) == 6
    }
    assert len(reported) > 10
    kept = {_name(row): _cells(row) for row in rows_of(SIMULATED)}
    assert reported == {name: kept[name] for name in reported}


def _name(row: dict[str, Any]) -> str:
    """As the page calls an experiment."""
    name = re.sub(r"BERT, (\d+) blocks", r"BERT \1", row["experiment"])
    if "fine-tuning" in name:
        return name
    return f"{name}, `{row['layout']}`" + (" R" if row["recomputes"] else "")


def _cells(row: dict[str, Any]) -> list[str]:
    numbers = [row["times_as_fast"].get(name) for name in COLUMNS]
    numbers += [row["alike"]["times_as_fast"], row["alike"]["memory"]]
    return ["-" if number is None else f"{number:.2f}" for number in numbers]
