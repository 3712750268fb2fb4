"""`bench.gpu.all` with processes that are forked, and do not import torch again.

With `--fake` as the first argument, its parts are those of this file.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import pytest

from bench.gpu import all as every
from bench.gpu.checked import Checks, Setting, by_name
from bench.gpu.part_process import Part
from bench.gpu.table import Line
from tests.run.support.forked_python import ForkedPopen


def fine(setting: Setting) -> dict[str, Any]:
    """Notes that it has run."""
    with (setting.folder / "ran").open("a") as file:
        file.write("fine\n")
    return {"value": 2.0}


def mended(setting: Setting) -> dict[str, Any]:
    """Raises, unless the folder says that it is mended."""
    if not (setting.folder / "mended").exists():
        raise ValueError("not mended yet")
    return {"value": 1.0, "fine": setting.earlier["fine"]["value"]}


def dies(setting: Setting) -> dict[str, Any]:
    """As of an illegal memory access."""
    os._exit(3)


def hangs(setting: Setting) -> dict[str, Any]:
    """For a minute."""
    time.sleep(60)
    return {}


def late(setting: Setting) -> dict[str, Any]:
    """For which no time is left."""
    return {"value": 3.0}


CHECKS: Final[Checks] = by_name(fine, mended, dies, hangs, late)


def _part(name: str, **options: Any) -> Part:
    options = {"timeout_s": 20.0, "needs_s": 0.1, **options}
    return Part(name, __spec__.name, name, **options)


def _ratio(rows: Sequence[Any]) -> tuple[str, bool]:
    value = rows[0]["value"] / rows[1]["value"]
    return f"{value:.1f}", value >= 2


FAKE: Final = every.Plan(
    {"exact": ([_part("hangs", timeout_s=2.0), _part("fine")], 60.0)},
    [_part("dies"), _part("late", needs_s=1e6), _part("mended")],
    [
        Line("ratio", ">= 2", "mended", ("fine", "mended"), _ratio),
        Line("late", "any", "nothing", ("late",), _ratio),
    ],
)


def main() -> None:
    """Run it; its arguments are this process's."""
    is_fake = sys.argv[1:2] == ["--fake"]
    if is_fake:
        del sys.argv[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.gpu.part_process.Popen", ForkedPopen)
        every.main(FAKE if is_fake else every.PLAN)


if __name__ == "__main__":
    main()
