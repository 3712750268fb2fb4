"""Live activations on real workers are what the schedules' formulas say, in bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.run.support.forked import answers_of

SCHEDULES: Final = ["1f1b", "zb-h2", "zb-v"]
NUM_WORKERS: Final = 2
OFF: Final = 0.05


@pytest.mark.long
@pytest.mark.timeout(180)
def test_no_device_is_far_from_its_formula(tmp_path: Path) -> None:
    """With weights that wait for W and without, one and two stages per device."""
    rows, _ = answers_of(
        "bench.activations.run:worker",
        SCHEDULES,
        3 * NUM_WORKERS,
        str(tmp_path),
        num_workers=NUM_WORKERS,
        folder=tmp_path,
        whole_s=150.0,
    )

    assert len(rows) == 2 * len(SCHEDULES)
    for row in rows:
        assert len(row["devices"]) == NUM_WORKERS
        assert all(abs(device["error"]) <= OFF for device in row["devices"]), row
    units = {
        row["schedule"]: [x["formula_units"] for x in row["devices"]] for row in rows
    }
    assert units["1f1b"] == [2, 1]
    held = {row["schedule"]: row for row in rows if row["waits"]}
    _, last = held["zb-h2"]["devices"]
    formula_bytes = last["formula_units"] * held["zb-h2"]["unit_bytes"]
    assert last["due_bytes"] > formula_bytes  # what W holds comes on top of it
