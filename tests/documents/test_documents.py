"""What the documents say is so: their code runs, their links and commands exist."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from scripts.write_rooms import PAGE, with_table
from tests.documents.blocks import (
    DOCUMENTS,
    ROOT,
    blocks_of,
    documents_with,
    name_of,
)
from tests.run.support.forked_python import run_forked_python

LINK: Final = re.compile(r"\]\((?!https?:)([^)#]+)")
TARGET: Final = re.compile(r"^([a-z-]+):", re.MULTILINE)
COMMAND: Final = re.compile(r"(?:`|^)make ([a-z-]+)", re.MULTILINE)


@pytest.mark.parametrize("document", documents_with("pycon"))
def test_sessions_print_what_they_show(document: Path) -> None:
    """A reader who types a page's session sees what the page shows, in one go."""
    session = "\n".join(blocks_of(document, "pycon"))
    test = doctest.DocTestParser().get_doctest(session, {}, name_of(document), None, 0)
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert not report, "".join(report)


@pytest.mark.parametrize("document", documents_with("python"))
def test_programs_run(document: Path, free_dir: Path) -> None:
    """Each program of a document runs as it stands, in a process of its own.

    That of the README is a new Python, which imports all that it needs; the others are
    forked from one that has.
    """
    for number, program in enumerate(blocks_of(document, "python")):
        script = free_dir / f"block_{number}.py"
        script.write_text(program)
        variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        if document == ROOT / "README.md":
            done = subprocess.run(
                [sys.executable, "-W", "error", str(script)],
                env=variables,
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
        else:
            done = run_forked_python(
                ["-W", "error", script], free_dir, timeout_s=100, variables=variables
            )
        assert done.returncode == 0, done.stderr


def test_links_lead_somewhere() -> None:
    """Links between files survive a move of either file."""
    lost = [
        f"{name_of(document)}: {to}"
        for document in DOCUMENTS
        for to in LINK.findall(document.read_text())
        if not (document.parent / to).exists()
    ]
    assert lost == []


def test_the_table_of_rooms_is_what_they_say() -> None:
    """`python scripts/write_rooms.py` writes it."""
    page = PAGE.read_text()
    assert with_table(page) == page
    assert page.count(" holds |") == 1


def test_files_of_the_architecture_exist() -> None:
    """Those that are named with their folder."""
    named = set(re.findall(r"[\w/]+/\w+\.py", PAGE.read_text()))
    assert len(named) > 20
    missing = [x for x in named if not (ROOT / "src/hocket" / x).exists()]
    assert not [x for x in missing if not (ROOT / x).exists()]


def test_make_targets_exist() -> None:
    """A `make something` in a document is a target of the Makefile."""
    targets = set(TARGET.findall((ROOT / "Makefile").read_text()))
    unknown = [
        f"{name_of(document)}: make {name}"
        for document in DOCUMENTS
        for name in COMMAND.findall(document.read_text())
        if name not in targets
    ]
    assert unknown == []


def test_make_lists_every_target() -> None:
    """`make` alone names each target of the Makefile, with a word on what it does."""
    makefile = (ROOT / "Makefile").read_text()
    listed = subprocess.run(
        ["make", "--no-print-directory"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert set(re.findall(r"^  make ([a-z-]+) +\S", listed, re.MULTILINE)) == set(
        TARGET.findall(makefile)
    )
