"""Refuse files that are too long or named for nothing, full folders, too much code.

Run from anywhere: `python scripts/check_sizes.py`. Prints what is at fault and ends
with 1; or counts files and the library's lines of code, and ends with 0.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDERS: Final = ("src", "tests", "bench", "examples", "docs", "scripts")
LIBRARY: Final = ROOT / "src" / "hocket"
MAX_LINES: Final = 500
MAX_FILES: Final = 16  # Python files in a folder of the library
ON_TOP: Final = {"run": 6}  # what stands on top of the rooms of a folder
ONE_FILE_EACH: Final = frozenset({"schedules", "passes"})  # one schedule, one pass
EMPTY_NAMES: Final = frozenset({"common", "helpers", "misc", "tools", "util", "utils"})
_NO_CODE: Final = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)


def faults_of(path: Path, num_lines: int) -> Iterator[str]:
    """Say what is wrong with one file, a sentence each.

    Args:
        path: the file; only its name is looked at.
        num_lines: how long it is.
    """
    if num_lines > MAX_LINES:
        yield f"{num_lines} lines, where {MAX_LINES} are allowed: split by meaning"
    if path.stem in EMPTY_NAMES:
        yield "the name says nothing of what is in it: name the noun it is about"


def folder_faults(folder: str, num_files: int) -> Iterator[str]:
    """Say whether a folder of the library has too many Python files.

    Args:
        folder: its path inside of src/hocket.
        num_files: Python files that it has itself.
    """
    allowed = ON_TOP.get(folder, MAX_FILES)
    if num_files > allowed and folder not in ONE_FILE_EACH:
        yield f"{num_files} Python files, where {allowed} are allowed: make rooms"


def budget_faults(num_code: int) -> Iterator[str]:
    """Say whether the library has more lines of code than pyproject.toml allows.

    Args:
        num_code: the lines of code in src/hocket.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    allowed = settings["tool"]["check_sizes"]["max_code_lines"]
    if num_code > allowed:
        yield (
            f"{num_code:,} lines of code, where max_code_lines in pyproject.toml "
            f"allows {allowed:,}: make it shorter elsewhere, the number only falls"
        )


def lines_of_code(source: str) -> int:
    """Count the lines of a Python file without docstrings, comments and blank lines."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - set(_docstring_lines(source)))


def _docstring_lines(source: str) -> Iterator[int]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            yield from range(text.lineno, (text.end_lineno or text.lineno) + 1)


def main() -> int:
    """Check every Python file of the repository, and return the exit code."""
    files = [path for name in FOLDERS for path in sorted((ROOT / name).rglob("*.py"))]
    faults = [
        f"{path.relative_to(ROOT)}: {fault}"
        for path in files
        for fault in faults_of(path, len(path.read_text().splitlines()))
    ]
    own = [path for path in files if path.is_relative_to(LIBRARY)]
    rooms = [path.parent.relative_to(LIBRARY).as_posix() for path in own]
    faults += [
        f"src/hocket/{room}: {fault}"
        for room in sorted({*rooms})
        for fault in folder_faults(room, rooms.count(room))
    ]
    stubs = LIBRARY.rglob("*.pyi")  # names that stand there are code as well
    num_code = sum(lines_of_code(path.read_text()) for path in (*own, *stubs))
    faults += [f"src/hocket: {fault}" for fault in budget_faults(num_code)]
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults:
        print(f"{len(files)} Python files, none over {MAX_LINES} lines")
        print(f"{num_code:,} lines of code in src/hocket")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
