"""Emulated devices keep a flush-free order, and lose what messages take."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from bench.emulated.table import idle
from tests.run.support.forked import answers_of

SCHEDULES: Final = ["pipedream-2bw", "wpipe", "wpipe-overlapped"]
NUM_WORKERS: Final = 3
DELAY: Final = 0.25
FORWARD_S: Final = 0.02
LESS: Final = 0.02  # a busy machine makes it more, by an unknown amount


@pytest.mark.long
@pytest.mark.timeout(300)
def test_emulated_devices_idle_no_less_than_the_formula(tmp_path: Path) -> None:
    """By the runtime's times; in the order, by what the layers note."""
    rows, *_ = answers_of(
        "bench.emulated.flush_free:worker",
        SCHEDULES,
        [DELAY],
        1,
        str(tmp_path / "profiles"),
        FORWARD_S,
        num_workers=NUM_WORKERS,
        folder=tmp_path / "job",
        whole_s=250.0,
    )

    assert [row["schedule"] for row in rows] == SCHEDULES
    for row in rows:
        assert row["in_order"], row
        assert row["simulated"] == pytest.approx(row["formula"], abs=1e-3), row
        assert row["measured"] >= row["formula"] - LESS, row
    assert [row["formula"] for row in rows] == [0.1, 0.1818, 0.0]
    assert [line[0] for line in idle(rows)[1:]] == ["3"] * 3
