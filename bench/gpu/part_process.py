"""A part of `bench.gpu.all` is a process of its own, in a process group of its own.

    start      a Python that imports what the part needs, and waits for a word
    go         the word: its checks run, and each one's row is added to a file
    deadline   what still runs then is killed, with all that it started

So a process can be started while the one before it measures.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import Any, Final

_GRACE_S: Final = 5.0  # a process that is inside the driver may not end at once
_BEFORE_THE_END_S: Final = 3.0  # it then prints where it is
_OUTPUT_CHARS: Final = 6000  # of what a part printed last
_POLL_S: Final = 0.01
_ERROR_CHARS: Final = 300


@dataclass(frozen=True, slots=True)
class Part:
    """Checks that run in one process.

    Args:
        name: in the result and in tables.
        module: its `CHECKS` are functions from a `Setting` to a row.
        check: the only one that runs; all of them, one by one, when not given.
        timeout_s: after which the process is killed.
        needs_s: with less than this left, it is not started.
        variables: of its environment, besides this process's.
    """

    name: str
    module: str
    check: str = ""
    timeout_s: float = 60.0
    needs_s: float = 15.0
    variables: Mapping[str, str] = field(default_factory=dict)


class PartProcess:
    """A part that has been started, and waits.

    Args:
        part: what it is.
        asked: JSON for `run`: "folder", "result", "quick".
    """

    def __init__(self, part: Part, asked: Mapping[str, Any]) -> None:
        self._part = part
        self._place = TemporaryDirectory()
        self._folder = Path(self._place.name)
        arguments = {**asked, "module": part.module, "check": part.check}
        arguments["parent"] = os.getpid()
        self._process = start_python(
            ["-m", "bench.gpu.part_process", self._place.name, json.dumps(arguments)],
            self._folder / "output",
            part.variables,
        )

    def go(self, timeout_s: float) -> dict[str, Any]:
        """Let it run; return what it found until its end or its timeout."""
        begin_s = time.monotonic()
        _write_at_once(self._folder / "go", str(timeout_s))
        code = end(self._process, begin_s + timeout_s)
        rows, output = self._folder / "rows", self._folder / "output"
        lines = rows.read_text().splitlines() if rows.exists() else []
        found = {row.pop("check"): row for row in map(json.loads, lines)}
        printed = output.read_text(errors="replace")[-_OUTPUT_CHARS:].splitlines()
        self._place.cleanup()
        error = _error_of(code, timeout_s, found, printed)
        record = {
            "holds": not error,
            "seconds": round(time.monotonic() - begin_s, 2),
            "rows": found,
        }
        return record | ({"error": error, "printed": printed} if error else {})

    def drop(self) -> None:
        """End it before it has run."""
        end(self._process, 0.0)
        self._place.cleanup()


def _error_of(
    code: int | None, timeout_s: float, found: Mapping[str, Any], printed: Sequence[str]
) -> str:
    """What went wrong, in a line; nothing if all rows hold."""
    last = printed[-1] if printed else "it printed nothing"
    if code is None:
        return f"had not ended after {timeout_s:.0f} s"
    if code:
        return f"exit code {code}: {last}"[:_ERROR_CHARS]
    wrong = [name for name, row in found.items() if not row["holds"]]
    if not wrong:
        return "" if found else "no check ran"
    reason = str(found[wrong[0]].get("error", "not as it should be")).strip()
    return f"{', '.join(wrong)}: {reason.splitlines()[-1]}"[:_ERROR_CHARS]


def start_python(
    arguments: Sequence[str],
    output: Path,
    variables: Mapping[str, str] | None = None,
) -> Popen[Any]:
    """Start `python ARGUMENTS`; what it prints goes to a file."""
    with output.open("wb") as file:
        return Popen(
            [sys.executable, *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(variables or {})},
        )


def end(process: Popen[Any], deadline_s: float) -> int | None:
    """Wait for a process until a time, then kill it and all that it started.

    Args:
        process: from `start_python`.
        deadline_s: in the time of `time.monotonic`.

    Returns:
        Its exit code; None if it was killed.
    """
    try:
        code: int | None = process.wait(max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        code = None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return code
    # If it stays inside the driver, the next part must do without what it holds.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    return code


def _write_at_once(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def run(folder: Path, asked: Mapping[str, Any]) -> None:
    """What the process does: import, wait for the word, and run the checks."""
    from bench.gpu.checked import Setting, here, run_check

    checks = import_module(asked["module"]).CHECKS
    word = folder / "go"
    while not word.exists():
        if os.getppid() != asked["parent"]:
            raise SystemExit("nobody is there to say when to go")
        time.sleep(_POLL_S)
    timeout_s = float(word.read_text())
    faulthandler.dump_traceback_later(max(1.0, timeout_s - _BEFORE_THE_END_S))
    setting = Setting(
        here(), asked["quick"], Path(asked["folder"]), _earlier(Path(asked["result"]))
    )
    for name in [asked["check"]] if asked["check"] else checks:
        row = run_check(name, partial(checks[name], setting))
        with (folder / "rows").open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")
    faulthandler.cancel_dump_traceback_later()


def _earlier(result: Path) -> dict[str, Any]:
    """The rows of parts that have one, and hold."""
    parts = json.loads(result.read_text())["parts"] if result.exists() else {}
    return {
        name: next(iter(part["rows"].values()))
        for name, part in parts.items()
        if part["holds"] and len(part["rows"]) == 1
    }


if __name__ == "__main__":
    run(Path(sys.argv[1]), json.loads(sys.argv[2]))
