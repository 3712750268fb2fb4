"""The example notebook runs from its first cell to its last."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

PATH = Path(__file__).parents[2] / "examples" / "digits.ipynb"


def sources(kind: str) -> list[str]:
    """The cells of a kind, as they are written."""
    cells = nbformat.read(PATH, as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == kind]


def test_is_short_and_without_outputs() -> None:
    """A long one is not read; what a machine printed is that machine's."""
    notebook = nbformat.read(PATH, as_version=4)

    assert sum(len(source.splitlines()) for source in sources("code")) < 80
    assert not any(cell.get("outputs") for cell in notebook.cells)


@pytest.mark.timeout(300)
def test_it_plans_trains_draws_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers train with two orders; their losses agree to the last digit."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(PATH, as_version=4)
    # Sockets in a folder: a port might be another's by the time the kernel binds it.
    monkeypatch.chdir(tmp_path)
    manager = AsyncKernelManager(transport="ipc", ip="kernel")
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, km=manager, timeout=200, resources=place).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pages = [html for output in shown if (html := html_of(output))]

    assert len(pages) == 4
    assert all("<svg" in page and "<script" not in page for page in pages)
    line = r"^(\S+) +loss ([\d.]+)  <hocket.Timeline measured"
    rows = re.findall(line, shown[-1]["text"], re.MULTILINE)
    assert [name for name, _ in rows] == ["1f1b", "zb-h1"]
    assert rows[0][1] == rows[1][1]


def html_of(output: Any) -> str:
    """The HTML of a cell's result; empty for what it printed."""
    return output.get("data", {}).get("text/html", "")
