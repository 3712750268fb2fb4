"""`import hocket` is instant, and its public names are all there."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Final

import hocket

IMPORT_SECONDS: Final = 0.2
TRIES: Final = 50
ROOT: Final = Path(__file__).parents[1]

TIMED_IMPORT: Final = """
import sys, time
start_s = time.perf_counter()
import hocket
print(time.perf_counter() - start_s)
sys.exit("torch" in sys.modules)
"""


def fresh_import() -> tuple[float, bool]:
    """Import hocket in a new process: seconds it took, and whether torch came along."""
    done = subprocess.run(
        [sys.executable, "-c", TIMED_IMPORT],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not done.stderr
    return float(done.stdout), done.returncode != 0


def test_import_takes_an_instant_and_no_torch() -> None:
    """Planning, simulating and drawing never wait for torch: 0.2 s at the very most.

    One of many tries, because another process may hold the cores during any of them.
    """
    for _ in range(TRIES):
        seconds, torch_came = fresh_import()
        assert not torch_came
        if seconds < IMPORT_SECONDS:
            return
    raise AssertionError(f"`import hocket` took {seconds} s")


def test_public_names_are_what_can_be_imported() -> None:
    """`__all__` holds every public name once, and each of them loads."""
    assert len(hocket.__all__) == len(set(hocket.__all__))
    for name in hocket.__all__:
        assert getattr(hocket, name) is not None
    assert set(dir(hocket)) >= set(hocket.__all__)


def test_no_public_name_is_forgotten() -> None:
    """What hocket itself defines under a public name is listed in `__all__`."""
    ours = {
        name
        for name, value in vars(hocket).items()
        if getattr(value, "__module__", "").startswith("hocket")
    }
    assert {name for name in ours if not name.startswith("_")} <= set(hocket.__all__)


def test_type_checkers_see_what_loads() -> None:
    """The imports written for type checkers name the objects that really come."""
    source = Path(str(hocket.__file__)).with_suffix(".pyi").read_text()
    homes = {
        alias.name: node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
        if node.module.startswith("hocket.")
    }
    assert set(homes) == set(hocket.__all__)
    for name, module in homes.items():
        assert getattr(hocket, name) is getattr(importlib.import_module(module), name)


def test_plan_is_a_plain_function() -> None:
    """`hocket.plan` shares its name with no module, so no import replaces it."""
    importlib.import_module("hocket.core.op")
    assert inspect.isfunction(hocket.plan)


def test_version_is_that_of_the_package() -> None:
    """One number: the code and the installer agree."""
    assert hocket.__version__ == version("hocket")


def test_pages_name_nothing_but_public_names() -> None:
    """What a page says to import or to call is importable from `hocket`.

    Explanations and decisions speak of the code itself, as pages for those do who
    change it.
    """
    inside = {"explanation", "decisions", "_build", "add-a-schedule", "change-hocket"}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in pages
        if not inside & {*path.parts, path.stem}
        for name in re.findall(r"\bhocket\.([A-Za-z_]\w*)", path.read_text())
    }
    assert len(named) > 100
    files = {
        "egg",
        "git",
        "toml",
        "json",
        "html",
        "py",
        "log",
        "md",
    }  # of names of files
    assert not {x for x in named if not hasattr(hocket, x[1]) and x[1] not in files}
    rooms = {path.parent.name for path in (ROOT / "src/hocket").glob("*/__init__.py")}
    assert not {x for x in named if x[1] in rooms - {"draw", "freeze"}}


def test_errors_name_nothing_but_public_names() -> None:
    """An error that sends a user to a module which may move is of little help."""
    raised = [
        (path, node)
        for path in sorted((ROOT / "src/hocket").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise)
    ]
    texts = [
        (path.name, part.value)
        for path, node in raised
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    assert len(texts) > 1000
    assert not [x for x in texts if re.search(r"\bhocket\.[a-z_]+\.[a-z_]+\.", x[1])]
