"""`hocket train digits-vit`, a user's first command: its losses beside a CPU's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Final

from bench.gpu.checked import Checks, Row, Setting
from bench.gpu.part_process import end, start_python

# Float32, and other kernels: a CPU and a GPU part slowly.
NEAR: Final = 1e-2
FULL: Final = ("training.max_steps=40",)
SMALL: Final = ("training.max_steps=4", "model.width=16", "model.num_blocks=2")
TIMEOUT_S: Final = 60.0
ON_A_CPU: Final = {"HOCKET_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def as_it_is(setting: Setting) -> Row:
    """Without options, as many workers as fit the machine."""
    return _compared(setting, [])


def two_workers(setting: Setting) -> Row:
    """Two workers, which share the GPU where there is one."""
    return _compared(setting, ["--workers", "2"])


CHECKS: Final[Checks] = {"main job": as_it_is, "main job, two workers": two_workers}


def _compared(setting: Setting, options: Sequence[str]) -> Row:
    expected = _losses(setting, ["--workers", "1"], ON_A_CPU)
    found = _losses(setting, options, {})
    pairs = zip(found, expected, strict=True)
    worst = max(abs(a - b) / abs(b) for a, b in pairs)
    return {
        "losses": found,
        "cpu_losses": expected,
        "worst_error": worst,
        "holds": worst <= NEAR,
    }


def _losses(
    setting: Setting, options: Sequence[str], variables: Mapping[str, str]
) -> list[float]:
    """Train for some steps; the losses of all."""
    with TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        arguments = ["train", "digits-vit", "--run-dir", str(run_dir), *options]
        for option in FULL if setting.is_full else SMALL:
            arguments += ["--set", option]
        output = Path(folder) / "output"
        process = start_python(["-m", "hocket", *arguments], output, variables)
        if end(process, monotonic() + TIMEOUT_S) != 0:
            raise RuntimeError(output.read_text()[-4000:])
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["loss"] for row in rows if row["kind"] == "step"]
