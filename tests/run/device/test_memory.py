"""Workers hold what was predicted, and hardly more."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.run.support.forked import answers_of

OVER: Final = 0.05  # what the benchmark's larger models stay below, too
UNDER: Final = 0.30  # a message on its way counts for its receiver; it lies in a slot

RUNS: Final = [
    ["transformer", "gpipe", "none"],
    ["transformer", "1f1b", "all"],
    ["transformer", "interleaved-1f1b", "all"],
    ["resnet", "1f1b", "none"],
    ["resnet", "gpipe", "all"],
]


@pytest.mark.timeout(240)
def test_no_more_is_held_than_must_be(tmp_path: Path) -> None:
    """Weights, gradients, optimizer, activations and messages, by the allocator."""
    rows, _ = answers_of(
        "memory_workers:measure_all",
        RUNS,
        str(tmp_path),
        folder=tmp_path,
        whole_s=200.0,
    )

    assert len(rows) == 2 * len(RUNS)
    for row in rows:
        assert -UNDER <= row["over"] <= OVER, row
    held = {
        (row["case"], row["schedule"], row["recompute"], row["device"]): row
        for row in rows
    }
    whole = held["transformer", "gpipe", "none", 0]["measured_bytes"]
    assert held["transformer", "1f1b", "all", 0]["measured_bytes"] < 0.7 * whole
