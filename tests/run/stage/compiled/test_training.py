"""Pipelines of compiled stages equal the plain loop, after 20 AdamW steps in float64.

Design, section 4. The last batch is smaller, so that some microbatches have a size that
nothing was compiled for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.run.support.comparison import case, check_runs

QUICK: Final = [case("dropout", "zb-h1", 4, compile=True)]
LONG: Final = {
    1: [case("normed", "1f1b", 3, compile=True)],
    2: [
        case("tied", "1f1b", 4, compile=True),
        case("tied-dropout", "zb-h1", 4, compile=True),
        case("normed", "zb-h1", 4, compile=True, recompute="all"),
        case("dropout", "interleaved-1f1b", 4, compile=True),
        case("dropout", "zb-v", 4, compile=True),
        case("tied", "1f1b", 2, compile=True, transport="torch"),
    ],
    4: [case("tied-dropout", "zb-h1", 4, compile=True, num_replicas=2)],
}


@pytest.mark.timeout(500)
def test_equals_the_plain_loop(tmp_path: Path) -> None:
    """Weights, losses of each step, and the evaluation."""
    check_runs(QUICK, 2, tmp_path, whole_s=450.0)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", sorted(LONG))
@pytest.mark.timeout(1700)
def test_equals_the_plain_loop_in_every_way(num_workers: int, tmp_path: Path) -> None:
    """With replicas, recomputation, BatchNorm, several stages and other transports."""
    check_runs(LONG[num_workers], num_workers, tmp_path, whole_s=1600.0)
