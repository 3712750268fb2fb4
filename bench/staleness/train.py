"""Train one case in one variant from one seed, and see what was learned."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Any, Final

import torch
from torch import nn

import hocket
from bench.staleness.cases import Case
from bench.staleness.variants import Variant
from hocket.recipes.objectives import evaluation_loader
from hocket.recipes.training.optimizer import make_scheduler
from hocket.recipes.training.task import Task, make_task
from hocket.run.data.batch import call_arguments
from hocket.run.data.loss import TOTAL, losses_of
from hocket.run.data.sample_loader import EvaluationLoader

NUM_POINTS: Final = 25  # of a curve: each is the mean over as many steps


def trained(case: Case, variant: Variant, seed: int, folder: Path) -> dict[str, Any]:
    """What came out.

    Args:
        case: what to learn.
        variant: with how old weights.
        seed: of all that is drawn; each variant begins with the same weights and sees
            the same batches.
        folder: with the data of all cases.
    """
    recipe = case.resolved(seed, folder)
    task = make_task(recipe)
    model = task.make_model()
    assert recipe.pipeline.cut is not None, "each case has a cut"
    begin_s = process_time()
    history = hocket.emulate(
        hocket.Program.chain(
            range(len(variant.delays)),
            recipe.pipeline.num_microbatches,
            delays=variant.delays,
        ),
        model,
        task.loss,
        case.optimizer(recipe),
        task.loader(),
        cut_at=recipe.pipeline.cut,
        schedulers=make_scheduler(task.learning_rate_share),
        clip_norm=recipe.training.clip_norm,
        seed=seed,
    )
    cpu_s = process_time() - begin_s
    means = evaluated(model, task, evaluation_loader(task.recipe, task.evaluation))
    return {
        "num_steps": len(history),
        "num_samples": len(history) * recipe.training.batch_size,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "learning_rate": recipe.optimizer.learning_rate,
        "metric": case.metric,
        "value": _kept(means[case.metric]) if isfinite(means[TOTAL]) else None,
        "loss": _kept(means[TOTAL]),
        "curve": curve([losses[TOTAL] for losses in history]),
        "cpu_s": round(cpu_s, 1),
    }


@torch.no_grad()
def evaluated(
    model: nn.Module, task: Task, loader: EvaluationLoader
) -> dict[str, float]:
    """Loss and metrics, as means over all samples, of the newest weights."""
    model.eval()
    sums: dict[str, float] = {}
    for inputs, targets in loader:
        args, kwargs = call_arguments(inputs)
        output = model(*args, **kwargs)
        named = losses_of(task.loss, output, targets)
        if task.metrics is not None:
            named = {**named, **task.metrics(output, targets)}
        for name, value in named.items():
            sums[name] = sums.get(name, 0.0) + value.item() * len(targets)
    return {name: total / loader.samples.num_samples for name, total in sums.items()}


def curve(losses: list[float], num_points: int = NUM_POINTS) -> list[float | None]:
    """Means over equal parts of training; None where it has left the numbers."""
    ends = [round(i * len(losses) / num_points) for i in range(num_points + 1)]
    parts = [losses[a:b] for a, b in pairwise(ends) if a < b]
    return [_kept(fmean(part)) for part in parts]


def _kept(value: float) -> float | None:
    """Rounded, for JSON, which has no numbers for what is none."""
    return round(value, 5) if isfinite(value) else None
