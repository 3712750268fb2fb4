"""The example notebook runs from its first cell to its last."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest

from tests.run.support.forked_python import run_forked_python
from tests.run.support.processes import environment

pytestmark = pytest.mark.skipif(
    find_spec("nbclient") is None, reason="`make setup` installs what runs notebooks"
)
PATH: Final = Path(__file__).parents[2] / "examples" / "digits.ipynb"
# What a kernel does with a cell: IPython runs it, and shows its last value.
RUN_CELLS: Final = """
import contextlib, io, json, sys
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
pages, texts = [], []
for source in json.loads(sys.argv[1]):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        done = shell.run_cell(source)
    done.raise_error()
    texts.append(printed.getvalue())
    if done.result is not None:
        formats, _ = shell.display_formatter.format(done.result)
        pages.append(formats["text/html"])
with open("run.json", "w") as file:
    json.dump({"pages": pages, "texts": texts}, file)
"""
# Sockets in a folder: a port might be another's by the time the kernel binds it.
RUN_NOTEBOOK: Final = """
import sys, nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
kernel = KernelManager(transport="ipc", ip="kernel")
NotebookClient(notebook, km=kernel, timeout=200).execute()
nbformat.write(notebook, "run.ipynb")
"""


def cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook that hold code."""
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


def check(pages: Sequence[str], text: str) -> None:
    """Pictures without scripts; both orders train to the same loss."""
    assert len(pages) == 4
    assert all("<svg" in page and "<script" not in page for page in pages)
    line = r"^(\S+) +loss ([\d.]+)  <hocket.Timeline measured"
    rows = re.findall(line, text, re.MULTILINE)
    assert [name for name, _ in rows] == ["1f1b", "zb-h1"]
    assert rows[0][1] == rows[1][1]


def test_is_short_and_without_outputs() -> None:
    """A long one is not read; what a machine printed is that machine's."""
    assert sum(len(cell["source"]) for cell in cells(PATH)) < 80
    assert not any(cell["outputs"] for cell in cells(PATH))


@pytest.mark.timeout(120)
def test_it_plans_trains_draws_and_compares(tmp_path: Path) -> None:
    """Two workers train with two orders; their losses agree to the last digit.

    All processes are forked; cells run as in a kernel.
    """
    sources = json.dumps(["".join(cell["source"]) for cell in cells(PATH)])
    done = run_forked_python(
        ["-c", RUN_CELLS, sources],
        tmp_path,
        timeout_s=100,
        variables={**environment(), "IPYTHONDIR": str(tmp_path / "ipython")},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads((tmp_path / "run.json").read_text())

    check(found["pages"], found["texts"][-1])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_kernel_runs_it(tmp_path: Path) -> None:
    """A new process, which starts the workers."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_NOTEBOOK, str(PATH)],
        cwd=tmp_path,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "IPYTHONDIR": str(tmp_path / "ipython"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outputs = [x for cell in cells(tmp_path / "run.ipynb") for x in cell["outputs"]]
    pages = ["".join(x["data"]["text/html"]) for x in outputs if "data" in x]

    check(pages, "".join(outputs[-1]["text"]))
