"""Pipelines whose messages go by way of the host, as on a GPU that workers share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.support.comparison import case, check_runs

CASES = [
    case("tied-dropout", "1f1b", 4),
    case("perceptron", "zb-v", 4),
    case("perceptron", "gpipe", 2, num_replicas=2),
]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("shares_memory", [True, False])
def test_staged_messages_train_the_same_weights(
    tmp_path: Path, *, shares_memory: bool
) -> None:
    """Each copy to the host ends half a millisecond late, over both transports."""
    cases = CASES if shares_memory else [{**CASES[0], "transport": "torch"}]

    check_runs(cases, 2, tmp_path, whole_s=120.0, entry="staged_workers:train_staged")
