"""Sharded stages equal the plain loop: layouts of one to four workers, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hocket
from hocket.errors import ConfigError
from hocket.schedules import make_schedule
from tests.run.support.comparison import case, check_runs, in_few_steps

# A batch norm has the statistics of each shard's microbatches, as over replicas: of
# these models none has one.
TWO = [
    case("tied", "1f1b", 2, num_shards=2),
    *in_few_steps(
        case("tied-dropout", "zb-h1", 2, num_shards=2, recompute="all"),
        case("tied", "1f1b", 1, num_shards=2, stages_per_device=1, compile=True),
    ),
]
FOUR = in_few_steps(
    case("tied", "zb-v", 4, num_shards=2, batch_size=30),
    case("dropout", "1f1b", 2, num_shards=2, num_replicas=2),
)
OTHERS = {
    2: [case("dropout", "gpipe", 2, num_shards=2)],
    4: in_few_steps(
        case("tied", "1f1b", 4, num_shards=2),
        case("tied-dropout", "zb-h1", 4, num_shards=2),
        case("tied", "interleaved-1f1b", 4, num_shards=2),
        case("tied", "1f1b", 1, num_shards=4),
    ),
    8: in_few_steps(
        case("tied", "zb-v", 4, num_shards=2, num_replicas=2, batch_size=38, last=20),
        case("tied-dropout", "1f1b", 2, num_shards=2, num_replicas=2, batch_size=30),
    ),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("num_workers", "runs"),
    [
        (2, TWO),
        (4, FOUR),
        *(pytest.param(n, OTHERS[n], marks=pytest.mark.long) for n in OTHERS),
    ],
)
def test_equals_the_plain_loop(
    num_workers: int, runs: list[dict[str, object]], tmp_path: Path
) -> None:
    """Weights, buffers, losses of each step, averages, and the evaluation."""
    check_runs(runs, num_workers, tmp_path)


def test_a_program_run_has_no_shards() -> None:
    """It says so, with the ways out, before anything is made."""
    schedule = make_schedule("1f1b", num_devices=1, num_microbatches=2, num_shards=2)
    with pytest.raises(ConfigError, match=r"num_shards=2\) for .*, or num_replicas=2"):
        hocket.ProgramRun(
            schedule,
            nn.Linear(2, 2),
            nn.functional.mse_loss,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            example=(torch.ones(4, 2), torch.ones(4, 2)),
        )
