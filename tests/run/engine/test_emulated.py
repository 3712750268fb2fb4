"""The runtime plays the simulated order, in no less time than it can take."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.run.support.forked import answers_of

NUM_WORKERS: Final = 4
SCHEDULES: Final = ["1f1b", "zb-v"]  # whole backwards, and I and W on two stages each
OP_MS: Final = 4.0  # F, I and W of a device's share
BUSY: Final = 3.0  # times slower, on a machine with much else to do


@pytest.mark.timeout(180)
def test_emulated_devices_keep_the_simulated_order(tmp_path: Path) -> None:
    """By what layers that sleep instead of computing note down themselves.

    Their makespan is at least that of the order with the times that they sleep.
    """
    rows, *others = answers_of(
        "bench.emulated.run:worker",
        SCHEDULES,
        2 * NUM_WORKERS,
        2,
        str(tmp_path),
        str(tmp_path / "picture.svg"),
        OP_MS,
        num_workers=NUM_WORKERS,
        folder=tmp_path,
        whole_s=150.0,
    )

    assert [row["schedule"] for row in rows] == SCHEDULES
    for row in rows:
        assert row["in_order"], row
        assert row["given_ms"] <= row["predicted_ms"] <= BUSY * row["given_ms"], row
        measured_ms = row["measured"]["median_ms"]
        assert row["given_ms"] <= measured_ms <= BUSY * row["predicted_ms"], row
    assert all(
        reported["in_order"] and reported["predicted_ms"] == row["predicted_ms"]
        for other in others
        for reported, row in zip(other, rows, strict=True)
    )
    assert "4 emulated devices" in (tmp_path / "picture.svg").read_text()
