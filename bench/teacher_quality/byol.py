"""BYOL on CIFAR-10: k-NN accuracy after training with teachers of different delays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Any, Final

import torch
from torch import Tensor, nn

import hocket
from bench.staleness.train import curve
from bench.teacher_quality.variants import BYOL, Byol
from hocket.recipes.config.resolve import resolve
from hocket.recipes.training.optimizer import make_optimizer, make_scheduler
from hocket.recipes.training.task import NAME, Task, make_task
from hocket.run.data.loss import TOTAL
from hocket.run.data.sample_loader import EvaluationLoader
from hocket.run.data.samples import Samples
from hocket.run.stage.net_output import with_teachers

RECIPE: Final = "cifar10-byol"
SETTINGS: Final = (
    "data.side=16",
    "model.width=16",
    "model.num_blocks=1",
    "teacher.momentum=0.95",
    "teacher.least_area=0.3",
    "teacher.head_width=128",
    "teacher.output_width=64",
    "training.num_epochs=8",
    "training.batch_size=64",
    "training.num_loaders=0",
    "optimizer.learning_rate=3e-3",
    "optimizer.num_warmup_steps=30",
    "pipeline.num_microbatches=1",
)
_NUM_NEIGHBOURS: Final = 20
_NUM_LAST: Final = 50  # steps whose loss is averaged


def runs(seed: int, folder: Path, variants: list[str]) -> Iterator[dict[str, Any]]:
    """Train each variant from the same weights, on the same views.

    Args:
        seed: of the weights, the order of the images and their views.
        folder: of all data.
        variants: names in `BYOL`.
    """
    settings = (*SETTINGS, f"training.seed={seed}")
    where = f"data.path={folder / 'cifar-10-batches-py'}"
    recipe = resolve(RECIPE, [*settings, where], allow_outside=True).recipe
    task = make_task(recipe)
    batches: list[Any] = []
    for name in variants:
        variant, begin_s = BYOL[name], process_time()
        model, losses = task.make_model(), []
        if variant.trains:
            batches = batches or [*task.loader()]
            losses = _train(task, model, variant, batches)
        yield {
            "variant": name,
            "seed": seed,
            "num_steps": len(losses),
            "num_images": len(losses) * recipe.training.batch_size,
            "num_parameters": sum(p.numel() for p in model.parameters()),
            "value": knn(model, task),
            "loss": round(fmean(losses[-_NUM_LAST:]), 5) if losses else None,
            "curve": curve(losses) if losses else [],
            "cpu_s": round(process_time() - begin_s, 1),
        }


def _train(
    task: Task, model: nn.Module, variant: Byol, batches: list[Any]
) -> list[float]:
    """Train a student and its teacher in this process; return each step's loss."""
    teacher = task.make_teachers()[NAME]
    assert teacher.update is not None, "the recipe's teacher follows the student"
    history = hocket.emulate(
        hocket.Program(
            (hocket.Net(NAME, 1), hocket.Net("student", 1)),
            (
                hocket.Stage(
                    NAME, 0, trainable=False, delay=variant.teacher, follows=(1,)
                ),
                hocket.Stage("student", 0, delay=variant.student),
            ),
            ((0, 1),),
            whole_batch_flows=frozenset([(0, 1)]),
        ),
        {"student": model, NAME: teacher.net.train()},
        {"student": with_teachers(task.loss, [NAME])},
        {"student": make_optimizer(task.recipe.optimizer), NAME: teacher.update},
        batches,
        schedulers={"student": make_scheduler(task.learning_rate_share)},
        seed=task.recipe.training.seed,
    )
    return [losses["student"][TOTAL] for losses in history]


def knn(model: nn.Module, task: Task) -> float:
    """Return the share of the test images that have their neighbours' class."""
    known, classes = _features(model, task.training)
    found, wanted = _features(model, task.evaluation)
    return hocket.knn_accuracy(
        known, classes, found, wanted, num_neighbours=_NUM_NEIGHBOURS
    )


@torch.no_grad()
def _features(model: nn.Module, samples: Samples) -> tuple[Tensor, Tensor]:
    model.eval()
    loader = EvaluationLoader(samples, 500)
    parts = [(model(images)["features"], classes) for images, classes in loader]
    features, classes = zip(*parts, strict=True)
    return torch.cat(features), torch.cat(classes)
