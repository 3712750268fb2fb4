"""Refuse Python files that are too long, or named for nothing in particular.

Run from anywhere: `python scripts/check_sizes.py`. Prints the files at fault and ends
with 1, or ends with 0 and one line that says how many files it read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDERS: Final = ("src", "tests", "bench", "examples", "docs", "scripts")
MAX_LINES: Final = 500
EMPTY_NAMES: Final = frozenset({"common", "helpers", "misc", "tools", "util", "utils"})


def faults_of(path: Path, num_lines: int) -> Iterator[str]:
    """What is wrong with one file, a sentence each.

    Args:
        path: the file; only its name is looked at.
        num_lines: how long it is.
    """
    if num_lines > MAX_LINES:
        yield f"{num_lines} lines, where {MAX_LINES} are allowed: split by meaning"
    if path.stem in EMPTY_NAMES:
        yield "the name says nothing of what is in it: name the noun it is about"


def main() -> int:
    """Check every Python file of the repository, and return the exit code."""
    files = [path for name in FOLDERS for path in sorted((ROOT / name).rglob("*.py"))]
    faults = [
        f"{path.relative_to(ROOT)}: {fault}"
        for path in files
        for fault in faults_of(path, len(path.read_text().splitlines()))
    ]
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults:
        print(f"{len(files)} Python files, none over {MAX_LINES} lines")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
