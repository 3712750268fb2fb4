"""Measures hocket on a GPU in ten minutes, in parts that fail one by one.

    python -m bench.gpu.first FOLDER [--quick] [--parts train,waits] [--wheels .whl]

Each part is a process with a timeout of its own, so that none stops the next; what all
have found so far is in FOLDER/first.json after each. Without a GPU the parts run on the
CPU, and say what needs a GPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.gpu.part_process import end, start_python

RESULT: Final = "first.json"
WHEELS: Final = Path(".whl")
INSTALL_TIMEOUT_S: Final = 60
OUTPUT_CHARS: Final = 6000  # of what a part printed last
BEFORE_THE_END_S: Final = 3.0  # it then prints where it is


@dataclass(frozen=True, slots=True)
class Part:
    """Some checks that run in one process.

    Args:
        module: in `bench.gpu`; its `CHECKS` run one by one.
        timeout_s: after which the process is killed.
    """

    module: str
    timeout_s: float

    def slowed(self, factor: float) -> Part:
        """The same with a timeout that is so many times as long."""
        return replace(self, timeout_s=self.timeout_s * factor)


# With the installation ten minutes at most. What stands on less comes earlier.
PARTS: Final = {
    "machine": Part("machine", 40),
    "torch": Part("bare_torch", 30),
    "device": Part("device", 50),
    "train": Part("one_worker", 60),
    "exact": Part("checks", 80),
    "waits": Part("waits", 50),
    "speed": Part("speed", 80),
    "variants": Part("variants", 50),
    "nccl": Part("communicators", 50),
    "two": Part("two_processes", 50),
}


def main() -> None:
    """Run all parts, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="the smallest sizes")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="installed first")
    parser.add_argument("--slow", type=float, default=1.0, help="times each timeout")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.parts.split(",")
    quick, slow = arguments.quick, arguments.slow
    if arguments.rows:
        part = PARTS[names[0]].slowed(slow)
        run_part(part, arguments.folder, arguments.rows, quick=quick)
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as site:
        result: dict[str, Any] = {"wheels": install(arguments.wheels, Path(site))}
        for name in names:
            result[name] = start_part(name, arguments.folder, quick=quick, slow=slow)
            write_flushed(arguments.folder / RESULT, result)
            print(summary(name, result[name]), flush=True)
    if not all(result[name]["holds"] for name in names):
        raise SystemExit(f"not all checks hold: see {arguments.folder / RESULT}")


def install(wheels: Path, site: Path) -> dict[str, Any]:
    """Install carried wheels for the parts, if there are any."""
    files = [str(path) for path in sorted(wheels.glob("*.whl"))]
    if not files:
        return {"installed": [], "holds": True}
    command = [*(sys.executable, "-m", "pip", "install", "--quiet", "--no-index")]
    command += ["--no-deps", "--no-compile", "--target", str(site), *files]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        return {"installed": [], "error": str(error), "holds": False}
    if done.returncode:
        return {"installed": [], "error": done.stderr, "holds": False}
    paths = [str(site), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return {"installed": [Path(file).name for file in files], "holds": True}


def start_part(name: str, folder: Path, *, quick: bool, slow: float) -> dict[str, Any]:
    """Run a part in a process of its own; what it found until its end or timeout."""
    begin_s, timeout_s = time.monotonic(), PARTS[name].slowed(slow).timeout_s
    with TemporaryDirectory() as place:
        rows, output = Path(place) / "rows", Path(place) / "output"
        arguments = ["-m", "bench.gpu.first", str(folder), "--parts", name]
        arguments += ["--rows", str(rows), "--slow", str(slow)]
        arguments += ["--quick"] if quick else []
        process = start_python(arguments, output)
        exit_code = end(process, begin_s + timeout_s)
        found = rows.read_text().splitlines() if rows.exists() else []
        printed = output.read_text(errors="replace")[-OUTPUT_CHARS:]
    checks = [json.loads(line) for line in found]
    return {
        "exit_code": exit_code,  # None: it was killed at its timeout
        "timeout_s": timeout_s,
        "seconds": round(time.monotonic() - begin_s, 2),
        "holds": exit_code == 0 and all(row["holds"] for row in checks),
        "checks": checks,
        "printed": printed.splitlines(),
    }


def run_part(part: Part, folder: Path, rows: Path, *, quick: bool) -> None:
    """Run a part's checks in this process, and add each one's row to a file."""
    faulthandler.dump_traceback_later(part.timeout_s - BEFORE_THE_END_S)
    import torch

    from bench.gpu.checked import Setting, run_check

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    setting = Setting(device, quick, folder)
    checks = import_module(f"bench.gpu.{part.module}").CHECKS
    for name, check in checks.items():
        row = run_check(name, partial(check, setting))
        with rows.open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")
    faulthandler.cancel_dump_traceback_later()


def write_flushed(path: Path, result: dict[str, Any]) -> None:
    """Replace a file; it is on the disk when this returns."""
    new = path.with_suffix(".new")
    with new.open("w") as file:
        json.dump(result, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def summary(name: str, found: dict[str, Any]) -> str:
    """One line: how a part ended, and which of its checks do not hold."""
    checks: Sequence[dict[str, Any]] = found["checks"]
    wrong = [row["check"] for row in checks if not row["holds"]]
    ended = "was killed" if found["exit_code"] is None else "ended"
    text = f"{name:9} {ended} after {found['seconds']:.1f} s, {len(checks)} checks"
    return f"{text}; not as it should be: {', '.join(wrong)}" if wrong else text


if __name__ == "__main__":
    main()
