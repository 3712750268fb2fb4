"""Whatever an optimizer and its schedule keep: trained right, saved, and gone on with.

Each of three stages has an optimizer and a schedule of its own. A plain loop with one
of each is the oracle; and a checkpoint of the three goes on in two stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from torch import Tensor, optim
from torch.optim import lr_scheduler as lr

import hocket
from hocket.run.weights.settings import OptimizerFactory, Parameters, SchedulerFactory
from hocket.teacher.lars import Lars
from tests.run.support.comparison import difference
from tests.run.support.optimizers import muon
from tests.run.support.small_models import ZOO, batches, make_model
from tests.run.support.started import started

NUM_STEPS: Final = 6
SAVED_AT: Final = 3
NUM_MICROBATCHES: Final = 3
TOLERANCE: Final = 1e-10


@dataclass(frozen=True, slots=True)
class Way:
    """An optimizer, and a schedule of its learning rate."""

    optimizer: OptimizerFactory
    scheduler: SchedulerFactory


def chained(optimizer: optim.Optimizer) -> lr.LRScheduler:
    """One schedule's rate times another's."""
    parts = [lr.ConstantLR(optimizer, 0.5, 2), lr.ExponentialLR(optimizer, 0.9)]
    return lr.ChainedScheduler(parts)


def falling(optimizer: optim.Optimizer) -> lr.LRScheduler:
    """A function of the step."""
    return lr.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def shrinking(optimizer: optim.Optimizer) -> lr.LRScheduler:
    """A factor for each step."""
    return lr.MultiplicativeLR(optimizer, lambda step: 0.9)


def up_and_down(optimizer: optim.Optimizer) -> lr.LRScheduler:
    """Between two rates, again and again."""
    return lr.CyclicLR(optimizer, 1e-4, 1e-2, step_size_up=2, cycle_momentum=False)


WAYS: Final = {
    "sgd": Way(
        partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        partial(lr.StepLR, step_size=2, gamma=0.5),
    ),
    "adamw": Way(
        partial(optim.AdamW, lr=1e-2, amsgrad=True),
        partial(lr.OneCycleLR, max_lr=1e-2, total_steps=20),
    ),
    "adafactor": Way(
        partial(optim.Adafactor, lr=1e-2), partial(lr.CosineAnnealingLR, T_max=8)
    ),
    "lars": Way(partial(Lars, lr=0.5, momentum=0.9), falling),
    "muon": Way(muon, up_and_down),
    "rmsprop": Way(
        partial(optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
        partial(lr.ExponentialLR, gamma=0.9),
    ),
    "nadam": Way(
        partial(optim.NAdam, lr=1e-2), partial(lr.PolynomialLR, total_iters=8)
    ),
    "radam": Way(
        partial(optim.RAdam, lr=1e-2), partial(lr.CosineAnnealingWarmRestarts, T_0=2)
    ),
    "adagrad": Way(
        partial(optim.Adagrad, lr=1e-2), partial(lr.MultiStepLR, milestones=[1, 4])
    ),
    "adamax": Way(partial(optim.Adamax, lr=1e-2), chained),
    "adadelta": Way(partial(optim.Adadelta, lr=1.0), shrinking),
    "asgd": Way(partial(optim.ASGD, lr=1e-2), partial(lr.LinearLR, start_factor=0.1)),
}


def data() -> list[Any]:
    """The batches of all steps."""
    return batches("perceptron", NUM_STEPS, 12, 12)


def pipeline_of(way: Way, num_stages: int) -> hocket.Pipeline:
    """On one device, with so many stages."""
    return started(
        make_model("perceptron"),
        ZOO["perceptron"].loss,
        way.optimizer,
        data()[0],
        scheduler=way.scheduler,
        schedule="looped-bfs",
        stages_per_device=num_stages,
        num_microbatches=NUM_MICROBATCHES,
    )


def plain(way: Way) -> dict[str, Tensor]:
    """The weights after a loop without a pipeline."""
    model, loss = make_model("perceptron"), ZOO["perceptron"].loss
    optimizer = way.optimizer(Parameters(dict(model.named_parameters())))
    scheduler = way.scheduler(optimizer)
    for inputs, targets in data():
        size = len(targets) // NUM_MICROBATCHES
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            (loss(model(x), y) / NUM_MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model.state_dict()


@pytest.mark.parametrize("name", WAYS)
def test_trains_and_goes_on_in_other_stages(name: str, tmp_path: Path) -> None:
    """The plain loop's weights; after the checkpoint, the same rates and weights."""
    way = WAYS[name]
    with pipeline_of(way, 3) as pipeline:
        for step, batch in enumerate(data()):
            if step == SAVED_AT:
                pipeline.save(tmp_path)
            pipeline.step(batch)
        whole, rates = pipeline.state_dict(), rates_of(pipeline)
    with pipeline_of(way, 2) as pipeline:
        pipeline.step(data()[0])  # so that there is something to replace
        pipeline.load(tmp_path)
        for batch in data()[SAVED_AT:]:
            pipeline.step(batch)
        again, same_rates = pipeline.state_dict(), rates_of(pipeline)

    assert same_rates == rates
    for key, expected in plain(way).items():
        assert difference(whole[key], expected) <= TOLERANCE, key
        assert difference(again[key], expected) <= TOLERANCE, key


def rates_of(pipeline: hocket.Pipeline) -> set[tuple[float, ...]]:
    """Of all stages' groups; they all have the same."""
    updaters = pipeline._executor.updaters.values()
    optimizers = [x.optimizer for x in updaters if x.optimizer is not None]
    return {tuple(group["lr"] for group in x.param_groups) for x in optimizers}
