"""One name has one number: on a run's page, in its terminal, as JSON, and compared."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hocket.cli.main import app
from hocket.core.timelines.timeline import Timeline
from hocket.draw.quantity import byte_size, percent, seconds, short
from tests.cli.test_train import RUN_TIMEOUT_S, SMALL, settings
from tests.draw.html.test_page import rows_of
from tests.run.support.forked_command import hocket_forked


def printed(command: str, *arguments: str) -> str:
    """What a command prints, with one space between words."""
    done = CliRunner().invoke(app, [command, *arguments])
    assert not done.exit_code, done.output
    return re.sub(" +", " ", done.output)


@pytest.mark.timeout(220)
@pytest.mark.parametrize("schedule", ["zb-v", "wpipe"])
def test_page_terminal_json_and_compare_agree(free_dir: Path, schedule: str) -> None:
    """Samples per second, peak memory, devices and stages, step and both bubbles."""
    options = settings(*SMALL, f"pipeline.schedule={schedule}")
    run = ("train", "digits-vit", "--run-dir=mine", *options)
    done = hocket_forked(*run, cwd=free_dir, timeout_s=RUN_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    lines = Path("mine/metrics.jsonl").read_text().splitlines()
    *_, summary = map(json.loads, lines)
    page = Path("mine/report.html").read_text()
    rows = {row[0]: row[1:] for row in reversed(rows_of(page))}
    compared, simulated = printed("compare", "mine", "mine"), simulated_numbers()
    measured = Timeline.from_json(Path("mine/timeline.json").read_text())
    program = measured.schedule.program

    def agree(name: str, text: str) -> None:
        assert f"{name} {text} {text} same" in compared

    speed, peak = short(summary["samples_per_s"]), byte_size(summary["peak_bytes"])
    agree("samples/s while training", speed)
    agree("rank 0's peak memory", peak)
    result = f"{speed} samples/s while training; rank 0's peak memory {peak}"
    assert result in done.stdout
    assert result.replace("'", "&#39;") in page
    advised = [f"<li>{x.replace(chr(39), '&#39;')}" for x in summary["advice"]]
    assert re.findall("<li>[^<]*", page)[: len(advised)] == advised
    assert advised
    said = {
        "step": ("time per step", "step_s", seconds),
        "bubble": ("bubble", "bubble_fraction", percent),
        "steady bubble": ("steady bubble", "steady_bubble_fraction", percent),
    }
    for name, (row, key, text) in said.items():
        both = [text(summary[f"{x}_{key}"]) for x in ("predicted", "measured")]
        assert f"{name}: {both[0]} predicted, {both[1]} measured" in done.stdout
        assert rows[row][:2] == both
        agree(f"{name}, predicted", both[0])
        agree(f"{name}, measured", both[1])
        assert simulated[key] == getattr(measured, key) == summary[f"measured_{key}"]
    tensors = byte_size(max(x["peak_bytes"] for x in simulated["devices"]))
    assert rows["peak bytes of tensors"][1] == tensors == byte_size(measured.most_bytes)
    sizes = f"{program.num_devices} devices, {program.num_stages} stages"
    assert (program.num_devices, program.num_stages) == (2, 4)
    assert f"; {sizes}" in page
    assert f"workers: {program.num_devices}, " in done.stdout
    assert f"stages: {program.num_stages}, from patches, " in done.stdout


def simulated_numbers() -> dict[str, Any]:
    """What `hocket simulate` says of the run's measured step."""
    numbers: dict[str, Any] = json.loads(
        printed("simulate", "mine/timeline.json", "--json")
    )
    return numbers


def test_sizes_of_several_timelines_are_each_ones(free_dir: Path) -> None:
    """ZB-V has two stages on each device, and 1F1B one."""
    printed("draw", "1f1b", "zb-v", "-d", "4", "-m", "8", "-o", "both.html")
    page = Path("both.html").read_text()
    assert "1f1b: 4 devices, 4 stages, 8 microbatches, 1 step; " in page
    assert "zb-v: 4 devices, 8 stages, 8 microbatches, 1 step" in page
