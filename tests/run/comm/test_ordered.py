"""Pipelines over wires that pair messages by their order, as NCCL does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.support.comparison import case, check_runs

CASES = {
    2: [case("tied-dropout", "1f1b", 4), case("perceptron", "zb-v", 4)],
    3: [
        case("perceptron", "zb-h1", 6),
        case("deep", "interleaved-1f1b", 6, stages_per_device=2),
    ],
    4: [case("perceptron", "gpipe", 4, num_replicas=2), case("deep", "1f1b", 8)],
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "num_workers", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 4))]
)
def test_the_planned_order_trains_the_same_weights(
    tmp_path: Path, num_workers: int
) -> None:
    """Each post blocks all that follows it until the peer posts its other end."""
    check_runs(
        CASES[num_workers],
        num_workers,
        tmp_path,
        whole_s=180.0,
        entry="ordered_workers:train",
    )
