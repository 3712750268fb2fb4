"""Workers that start a pipeline again and again, with folders of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hocket.run.cluster.world import join_world
from hocket.run.tune import build
from hocket.run.tune.cut import cut_model, profiled_model
from tests.run.support.started import started


def start_thrice(folder: str) -> dict[str, Any]:
    """First and second with this rank's folder, then rank 0 with an empty one.

    Rank 1's folder is empty the second time, and has everything the third time.
    """
    world = join_world()
    num_measured = 0
    patch = pytest.MonkeyPatch()
    for module, name in (
        (profiled_model, "profile_layers"),
        (cut_model, "measure_updates"),
        (build, "dry_run"),
    ):
        measure = getattr(module, name)

        def noted(*args: Any, measure: Any = measure, **named: Any) -> Any:
            nonlocal num_measured
            num_measured += 1
            return measure(*args, **named)

        patch.setattr(module, name, noted)

    found, counts = [], []
    for own in (("full", "empty"), ("full", "empty"), ("empty", "full")):
        num_before = num_measured
        batch = torch.ones(4, 3), torch.zeros(4, 3)
        torch.manual_seed(0)
        with started(
            nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
            nn.functional.mse_loss,
            torch.optim.SGD,
            batch,
            profile_dir=Path(folder) / own[world.rank],
            world=world,
        ) as pipeline:
            pipeline.step(batch)
            found.append(pipeline.plan.costs)
        counts.append(num_measured - num_before)
    everyone = [
        {*map(str, world.gather_json(str(costs), "costs"))} for costs in found[:2]
    ]
    are_equal = [len(texts) == 1 for texts in everyone]
    world.close()
    return {"measured": counts, "are_equal": are_equal}
