"""A plan from measurements: by one process that stands for all, or by all workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hocket.core.costs import Link
from hocket.errors import PlanError
from hocket.model.capture.capture import capture
from hocket.planner.rank import Search
from hocket.run.cluster.world import World
from hocket.run.tune.planning import plan
from hocket.run.tune.trial_runs import ProfileConfig
from hocket.run.weights.settings import TrainingConfig
from tests.run.support.forked import answers_of
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


MODELS = ["resnet", "tied-dropout"]


@pytest.mark.timeout(150)
def test_workers_measure_together_and_come_to_one_plan(tmp_path: Path) -> None:
    """Every worker finds the same numbers, DDP's too, and the models are as before."""
    first, second = answers_of(
        f"{__name__}:plan_together", MODELS, folder=tmp_path, whole_s=120.0
    )
    assert first == second
    *plans, last = first
    for found in plans:
        assert found.pop("as_it_was")
        schedules = {outcome["schedule"] for outcome in found["outcomes"]}
        assert schedules > {"ddp", "1f1b", "gpipe"}
        assert all(outcome["step_s"] > 0 for outcome in found["outcomes"])
    wrong_number, needless, no_choice = last["refused"]
    assert "2 workers, the plan is for 3 devices: ask for num_devices=2" in wrong_number
    assert "hardware='h100' needs no workers" in needless
    assert "links='10gb': the messages of these workers are measured" in no_choice


def test_alone_a_process_stands_for_all() -> None:
    """It plays what one device can play, and leaves the model as it was."""
    model = make_model("resnet")
    before = {key: x.clone() for key, x in model.state_dict().items()}
    generator = torch.default_generator.get_state()
    (batch,) = batches("resnet", 1, 16, 16)
    ranking = plan(
        model,
        batch,
        ZOO["resnet"].loss,
        num_devices=4,
        precision="bfloat16",
        search=Search(num_microbatches=(4,), recompute=(False,)),
    )
    assert ranking.best is not None
    assert "measured on" in ranking.how
    state = model.state_dict()
    assert all(torch.equal(state[key], x) for key, x in before.items())
    assert torch.equal(torch.default_generator.get_state(), generator)


def test_a_precision_that_a_cpu_has_not_is_refused() -> None:
    """With what there is instead."""
    (batch,) = batches("perceptron", 1, 8, 8)
    with pytest.raises(PlanError, match="measure with float32, bfloat16 or float16"):
        plan(make_model("perceptron"), batch, num_devices=2, precision="tf32")


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_measures_sizes_that_the_model_is_right_for(norm: type[nn.Module]) -> None:
    """A BatchNorm refuses a microbatch of one vector."""
    example = torch.ones(8, 6)
    net = nn.Sequential(nn.Linear(6, 4), norm(4))
    captured = capture(net, (example,), capture="export")
    settings = TrainingConfig(optimizer=torch.optim.SGD)
    link = Link()
    config = ProfileConfig(captured, None, None, settings, {}, 8, 2, (1,), link)
    assert config.sizes == ((4,) if norm is nn.BatchNorm1d else (1, 4))
