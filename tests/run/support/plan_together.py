"""What workers do in the tests of plans: measure together, and say what they found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hocket.errors import PlanError
from hocket.planner.rank import Search
from hocket.planner.ranking.report import Ranking
from hocket.run.cluster.world import World, join_world
from hocket.run.tune.planning import plan
from tests.run.support.short_measurements import measure_shortly
from tests.run.support.small_models import ZOO, batches, make_model


def plan_together(names: list[str]) -> list[dict[str, Any]]:
    """Plan each model on all workers, and look at what became of it.

    Args:
        names: of models.
    """
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        measure_shortly(patch)
        world = join_world()
        reported = []
        for name in names:
            model = make_model(name)
            before = {key: x.clone() for key, x in model.state_dict().items()}
            (batch,) = batches(name, 1, 16, 16)
            ranking = plan(
                model,
                batch,
                ZOO[name].loss,
                num_devices=world.world_size,
                search=Search(num_microbatches=(4,), recompute=(False,)),
                world=world,
            )
            reported.append({**ranking.to_json(), "as_it_was": _same(model, before)})
        reported.append(
            {
                "refused": [
                    _refused(world, num_devices=3),
                    _refused(world, hardware="h100"),
                    _refused(world, links="10gb"),
                ]
            }
        )
        world.close()
    return reported


def _same(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    state = model.state_dict()
    return all(torch.equal(state[key], x) for key, x in before.items()) and all(
        parameter.grad is None for parameter in model.parameters()
    )


def _refused(world: World, **more: Any) -> str:
    (batch,) = batches("perceptron", 1, 8, 8)
    wanted = {"num_devices": world.world_size, **more}
    try:
        found: Ranking = plan(make_model("perceptron"), batch, world=world, **wanted)
    except PlanError as error:
        return str(error)
    return str(found)
