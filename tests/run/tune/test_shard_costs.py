"""Gathers and reductions of shards are measured before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hocket
from tests.run.support.forked import answers_of

WIDTH = 64


def measured() -> list[float]:
    """Seconds of a gather and a reduction, and what they left of the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    batch = torch.ones(8, WIDTH), torch.zeros(8, WIDTH)
    begin = [p.detach().clone() for p in model.parameters()]
    pipeline = hocket.Pipeline(
        model,
        nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        example=batch,
        num_microbatches=2,
        num_shards=2,
    )
    costs, program = pipeline.plan.costs, pipeline.plan.schedule.program
    whole = pipeline.state_dict()
    same = all(map(torch.equal, begin, whole.values())) if pipeline.is_main else True
    (cost,) = costs.stages
    norm = pipeline.step(batch).grad_norm
    pipeline.close()
    return [cost.unshard_s, costs.reduce_s(0, program), norm, float(same)]


@pytest.mark.timeout(120)
def test_they_are_measured_and_change_nothing(tmp_path: Path) -> None:
    """All workers know the same seconds; weights and gradients are as before."""
    answers = answers_of(
        "tests.run.tune.test_shard_costs:measured", num_workers=2, folder=tmp_path
    )
    (gather_s, reduce_s, norm, same), other = answers
    assert other[:3] == [gather_s, reduce_s, norm]
    assert same
    assert gather_s > 0.0
    assert reduce_s > 0.0
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    output = model(torch.ones(8, WIDTH))
    nn.functional.mse_loss(output, torch.zeros(8, WIDTH)).backward()
    expected = nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None]
    )
    assert norm == pytest.approx(float(expected), rel=1e-5)  # nothing is left in it
