"""Pipelines that play I and W equal the plain loop, after AdamW steps in float64.

20 of them where an order is played first, a few in its relatives; `make test-long`
plays all of them for 20.

The orders are written down by hand here: what plays them must not depend on who makes
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.run.support.comparison import case, check_runs, in_few_steps

# The zero-bubble paper's H1 for two devices and four microbatches.
H1: Final = """\
d0  0F0 0F1 0I0 0F2 0I1 0W0 0F3 0I2 0W1 0I3 0W2 0W3 0U
d1  1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3 1U
"""
# All weight gradients at the end, in no good order.
LATE: Final = """\
d0  0F0 0F1 0I0 0F2 0I1 0F3 0I2 0I3 0W3 0W0 0W2 0W1 0U
d1  1F0 1I0 1F1 1I1 1F2 1I2 1F3 1I3 1W0 1W2 1W1 1W3 1U
"""
# Some backwards whole, and two stages on each device.
MIXED: Final = """\
d0  0F0 0F1 2F0 2F1 2I0 2W0 2B1 0I0 0I1 0W0 0W1 2U 0U
d1  1F0 1F1 3F0 3I0 3F1 3I1 3W1 3W0 1B0 1I1 1W1 3U 1U
"""
REPLICAS: Final = """\
steps 1
replicas 2
net model microbatches=2
stage 0 net=model device=0
stage 1 net=model device=1
flow 0>1
d0  0F0 0F1 0I0 0W0 0I1 0W1 0R 0U
d1  1F0 1I0 1F1 1I1 1W0 1W1 1R 1U
"""
ONE: Final = """\
d0  0F0 0I0 0F1 0W0 0I1 0W1 0U
"""

# Sizes of batches as in tests/run/engine/test_exactness.py.
JOBS: Final = {
    1: [
        case("resnet", ONE, 2, batch_size=7, last=5),
        case("tied", ONE, 2, batch_size=7, last=5),
    ],
    2: [
        case("perceptron", H1, 4),
        case("tied", H1, 4),
        case("tied-dropout", H1, 4, recompute="all"),
        case("tied", LATE, 4),
        case("resnet", H1, 4, transport="torch"),
        case("perceptron", LATE, 4, transport="torch"),
        case("dropout", MIXED, 2),
        case("tied", MIXED, 2, batch_size=7, last=5),
        case("timed", "zb-h1", 4, cut=["4"]),  # each stage ends in a view
        case("timed", MIXED, 2, cut=["2", "4", "6"]),
    ],
    4: [case("tied", REPLICAS, 2, num_replicas=2)],
}


QUICK: Final = {
    1: in_few_steps(*JOBS[1]),
    2: [*JOBS[2][2:3], *in_few_steps(*JOBS[2][3:])],
    4: in_few_steps(*JOBS[4]),
}


@pytest.mark.parametrize("num_workers", sorted(QUICK))
@pytest.mark.timeout(240)
def test_each_kind_equals_the_plain_loop(num_workers: int, tmp_path: Path) -> None:
    """Weights, buffers, losses of each step, and the evaluation."""
    check_runs(QUICK[num_workers], num_workers, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", sorted(JOBS))
@pytest.mark.timeout(240)
def test_equals_the_plain_loop(num_workers: int, tmp_path: Path) -> None:
    """Weights, buffers, losses of each step, and the evaluation."""
    check_runs(JOBS[num_workers], num_workers, tmp_path)
