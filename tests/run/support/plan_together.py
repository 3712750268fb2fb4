"""What workers do in the tests of plans: measure together, and say what they found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hocket.planner.rank import Search
from hocket.run.cluster.world import World
from hocket.run.tune.planning import plan
from tests.run.support.joined import join, said
from tests.run.support.short_measurements import measure_shortly
from tests.run.support.small_models import ZOO, batches, make_model


def plan_together(names: list[str]) -> list[dict[str, Any]]:
    """Plan each model on all workers, and look at what became of it.

    Args:
        names: of models.
    """
    with pytest.MonkeyPatch.context() as patch:
        measure_shortly(patch)
        world = join()
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
    return said(lambda: plan(make_model("perceptron"), batch, world=world, **wanted))
