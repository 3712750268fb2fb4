"""The parts of `bench.gpu.all`, in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from bench.gpu import freezing, ooo_single, share, speed, teacher
from bench.gpu.part_process import Part


def _parts(
    module: str, names: Iterable[str], timeout_s: float, needs_s: float = 15.0
) -> list[Part]:
    """A part for each check."""
    where = f"bench.gpu.{module}"
    return [Part(name, where, name, timeout_s, needs_s) for name in names]


# While the exact parts run: one step of each compiled net, for Inductor's cache.
WHILE_EXACT: Final = _parts("ooo_single", ooo_single.FILLS_CACHE, 90.0)
EXACT: Final = [
    Part(name, f"bench.gpu.{module}", timeout_s=90.0)
    for name, module in (
        ("machine", "machine"),
        ("exact", "checks"),
        ("device", "device"),
        ("train", "one_worker"),
        ("variants", "variants"),
        ("waits", "waits"),
        ("nccl", "communicators"),
        ("torch", "bare_torch"),
    )
] + _parts("ooo_single", ["compile_step, exact"], 90.0)
STARTED: Final = [
    *_parts("main_job", ["main job", "main job, two workers"], 75.0),
    *_parts("teacher", ["teacher, two workers", "teacher, one worker"], 75.0),
    *_parts("freezing", ["elastic freezing"], 75.0),
    share.EXACT,
    *_parts("one_job", ["waves, exact weights", "fill"], 75.0),
]
TIMED: Final = [
    *_parts("speed", speed.CHECKS, 60.0),
    *_parts("ooo_single", ooo_single.IN_TABLE, 60.0, 25.0),
    *share.TIMED,
    *_parts("one_job", ["waves, plain", "waves, exact", "waves, wave"], 40.0),
    *_parts("freezing", freezing.TIMED, 60.0),
    *_parts("teacher", teacher.TIMED, 60.0),
    *_parts("ooo_single", ooo_single.FURTHER, 60.0, 25.0),
]
