"""Every schedule that the runtime plays is exact with 5 to 8 workers, too.

Design, section 4, as in test_exactness, which has 1 to 4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from hocket.schedules import SCHEDULES
from tests.run.support.comparison import case, check_runs

# Compared with the emulator: chimera and tspipe, whose two nets ProgramRun trains
# (orders/chimera.txt, orders/tspipe.txt); stages that read old weights
# (test_flush_free.py).
FLUSH_FREE: Final = {"pipedream", "pipedream-2bw", "wpipe", "wpipe-overlapped"}
DATA_PARALLEL: Final = "reverse-first-k"  # test_reverse_first_k.py
NOT_HERE: Final = {"chimera", "tspipe", "forward-only", DATA_PARALLEL, *FLUSH_FREE}

JOBS: Final = {
    5: [
        case("perceptron", "gpipe", 5),
        case("tied-dropout", "1f1b", 6),
        case("tied", "v-min", 6),
        case("deep-dropout", "interleaved-zb", 5),
        case("resnet", "zb-auto", 4),
    ],
    6: [
        case("tied", "zb-h2", 9),
        case("resnet", "ooo-fast-forward", 6),
        case("deep-dropout", "hanayo", 6),
        case("deep", "v-half", 6),
        case("tied", "interleaved-1f1b", 3, num_replicas=2),
    ],
    7: [
        case("deep", "zb-v", 7),
        case("deep", "looped-bfs", 5),
        case("deep-dropout", "ooo-modulo", 7),
        case("resnet", "zb-h1", 7, transport="torch"),
    ],
    8: [
        case("deep", "dualpipe-v", 16, batch_size=34, last=17),
        case("tied", "zb-h1", 8, recompute="all"),
        case("tied-dropout", "zb-auto", 4, num_replicas=2),
        case("deep", "interleaved-zb", 8),
    ],
}


@pytest.mark.long
@pytest.mark.parametrize("num_workers", sorted(JOBS))
@pytest.mark.timeout(900)
def test_equals_the_plain_loop(num_workers: int, tmp_path: Path) -> None:
    """Weights, buffers, losses of each step, and the evaluation."""
    check_runs(JOBS[num_workers], num_workers, tmp_path, whole_s=800.0)


def test_no_schedule_is_left_out() -> None:
    """A new one must be played by many workers before it is let in."""
    played = {run["schedule"] for runs in JOBS.values() for run in runs}
    assert played == SCHEDULES.keys() - NOT_HERE
