"""Every synchronous pipeline equals the plain loop, after AdamW steps in float64.

20 of them where a kind of order is played first, a few in its relatives; `make
test-long` plays all of them for 20.
Design, section 4: whatever the order, the cut, the number of workers and of replicas;
with BatchNorm, dropout, tied weights, a skip across cuts, several inputs, arguments
that are no tensors, parameters without gradient, and a smaller last batch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.support.comparison import case, check_runs, quick_and_all

# Sizes of batches that are not the usual one are chosen for the form of microbatches:
# of that, the models are captured before workers begin (preloaded.py).
# Flushed and split, the first for the cut of batch norms, the second for tied weights
# that draw.
FIRST = {2: [case("resnet", "1f1b", 3), case("tied-dropout", "zb-v", 4)]}
# Every other order, a ring of replicas, and torch's messages.
RELATIVES = {
    1: [
        case("resnet", "gpipe", 3),
        case("tied", "1f1b", 4),
        case("dropout", "interleaved-1f1b", 4, stages_per_device=3),
    ],
    2: [
        case("tied", "looped-bfs", 4),
        case("tied", "gpipe", 2, num_replicas=2),
        case("tied", "interleaved-1f1b", 4, transport="torch"),
        case("tied", "zb-h1", 4),
        case("tied", "ooo-modulo", 4),
        case("resnet", "zb-h2", 4),
        case("perceptron", "v-half", 4),
        case("perceptron", "v-min", 4),
        case("perceptron", "ooo-fast-forward", 4),
        case("dropout", "hanayo", 4),
    ],
}
OTHERS = {
    2: [
        case("perceptron", "gpipe", 4),
        case("perceptron", "interleaved-1f1b", 4),
        case("tied", "1f1b", 4),
        case("dropout", "1f1b", 4),
        case("tied-dropout", "interleaved-1f1b", 4),
        case("resnet", "1f1b", 4, transport="torch"),
    ],
    3: [
        case("tied", "1f1b", 4),
        case("perceptron", "dualpipe-v", 6),
        case("tied", "interleaved-zb", 6, batch_size=22),
        case("dropout", "zb-auto", 6),
        case("resnet", "gpipe", 2, batch_size=7, last=5),
        case("dropout", "interleaved-1f1b", 3),
    ],
    4: [
        case("tied", "1f1b", 4, num_replicas=2, batch_size=30),
        case("dropout", "interleaved-1f1b", 4, num_replicas=2),
        case("perceptron", "gpipe", 2, num_replicas=4),
        case("tied-dropout", "1f1b", 4),
    ],
}
QUICK, JOBS = quick_and_all(FIRST, RELATIVES, OTHERS)


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
    for run in JOBS[num_workers]:
        if run["num_replicas"] > 1 and run["model"] == "resnet":
            pytest.fail(
                "replicas keep their own BatchNorm statistics; not in this test"
            )
    check_runs(JOBS[num_workers], num_workers, tmp_path)
