"""The benchmarks of orders without a flush say what is so, on small models."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from bench.flush_free.replicas import LAYOUTS, NAMES
from bench.flush_free.table import against, kinds, layouts, steps
from tests.run.support.forked import answers_of

SCHEDULES: Final = ["1f1b", "pipedream-2bw", "wpipe"]
OFF: Final = 0.05  # of the predicted peak


@pytest.mark.timeout(240)
def test_wpipe_holds_three_quarters_of_the_weights(tmp_path: Path) -> None:
    """2BW two copies, WPipe one and a half; and no more memory than was predicted."""
    rows, _ = answers_of(
        "tests.bench.flush_free_job:memory",
        SCHEDULES,
        str(tmp_path / "profiles"),
        folder=tmp_path / "job",
        whole_s=200.0,
    )

    copies = []
    for row in rows:
        weights, old = (
            sum(device[name] for device in row["devices"])
            for name in ("weight_bytes", "version_bytes")
        )
        copies.append((weights + old) / weights)
        for device in row["devices"]:
            parts = ("weight", "version", "gradient", "optimizer", "other")
            peak = sum(device[f"{part}_bytes"] for part in parts)
            assert peak == device["peak_bytes"]
            assert peak == pytest.approx(device["predicted_bytes"], rel=OFF)
    assert copies == [1.0, 2.0, 1.5]
    assert [line[1:3] for line in kinds(rows)[1:]] == [
        ["4", f"`{name}`"] for name in SCHEDULES
    ]
    ((*_, of_two_buffered, target),) = against(rows)[1:]
    assert (of_two_buffered, target) == ("**0.750**", "0.75")


@pytest.mark.long
@pytest.mark.timeout(240)
def test_steps_are_measured_beside_their_bounds(tmp_path: Path) -> None:
    """Every pipeline computes the right gradients, and is not faster than its bound."""
    rows, _ = answers_of(
        "tests.bench.flush_free_job:steps",
        SCHEDULES,
        3,
        str(tmp_path / "profiles"),
        folder=tmp_path / "job",
        whole_s=200.0,
    )

    assert [row["schedule"] for row in rows] == SCHEDULES
    for row in rows:
        assert row["gradients_off_by"] < 1e-5
        assert row["step_over_bound"]["of_medians"] > 0.9, row
        assert 0.0 < row["bubble"]["measured"] < 1.0
    assert rows[1]["speedup"]["of_medians"] == 1.0
    assert [line[1] for line in steps(rows)[1:]] == [f"`{name}`" for name in SCHEDULES]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_two_replicas_halve_the_bubble_of_one_f_one_b(tmp_path: Path) -> None:
    """Four emulated devices; no step is shorter than the work of one of them."""
    rows, *_ = answers_of(
        "bench.flush_free.replicas:worker",
        3,
        str(tmp_path / "profiles"),
        4e-3,
        num_workers=4,
        folder=tmp_path / "job",
        whole_s=200.0,
    )

    found = {(row["schedule"], row["layout"]): row for row in rows}
    assert set(found) == {(name, layout) for name in NAMES for layout in LAYOUTS}
    for row in rows:
        assert row["step"]["median_ms"] > row["work_ms"], row
    short, long = (found["1f1b", layout]["bubble"] for layout in ("2x2", "4x1"))
    assert short["predicted"] < long["predicted"]
    assert short["measured"] < long["measured"]
    for name in NAMES[1:]:
        assert found[name, "2x2"]["speedup"]["of_medians"] > 1.0
    assert [line[0] for line in layouts(rows)[1:]] == [row["layout"] for row in rows]
