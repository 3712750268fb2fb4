"""Distillation on SST-2: the accuracy of a small student, alone and with a teacher.

The teacher learns from all sentences. The student reads the same ones; or only the
first thousand, as in the experiment of Hinton et al. with 3 % of the data
(arXiv:1503.02531, section 6), where soft targets carry what the rest would have said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from time import process_time
from typing import Any, Final

from torch import nn

import hocket
from bench.staleness.train import curve, evaluated
from bench.teacher_quality.variants import DISTILLED
from hocket.recipes.config.resolve import resolve
from hocket.recipes.objectives import evaluation_loader
from hocket.recipes.training.optimizer import make_optimizer, make_scheduler
from hocket.recipes.training.task import Task, make_task
from hocket.run.data.loss import TOTAL
from hocket.run.stage.net_output import with_teachers

RECIPE: Final = "mrpc-bert"
TEMPERATURE: Final = 2.0
_BOTH: Final = (
    "data.task=sst2",
    "data.num_tokens=32",
    "data.num_pieces=8000",
    "model.num_heads=4",
    "training.clip_norm=",
    "training.num_loaders=0",
    "optimizer.learning_rate=1e-3",
    "optimizer.num_warmup_steps=20",
    "pipeline.num_microbatches=1",
)
TEACHER: Final = (
    *_BOTH,
    "model.width=64",
    "model.num_blocks=2",
    "model.mlp_width=128",
    "training.num_epochs=2",
)
STUDENT: Final = (
    *_BOTH,
    "model.width=16",
    "model.num_blocks=1",
    "model.mlp_width=32",
    "training.num_epochs=2",
)
FEW: Final = (*STUDENT, "data.max_samples=1000", "training.num_epochs=12")


def runs(
    settings: Sequence[str], seed: int, folder: Path, variants: list[str]
) -> Iterator[dict[str, Any]]:
    """Train a teacher, and then each variant from the same weights and batches.

    Args:
        settings: the student's.
        seed: of the weights, the order of the sentences and dropout.
        folder: of all data.
        variants: names in `DISTILLED`, and `teacher`.
    """
    task = _laid_out(TEACHER, seed, folder)
    teacher, begin_s = task.make_model(), process_time()
    history = hocket.emulate(
        hocket.Program.chain([0], 1),
        teacher,
        task.loss,
        make_optimizer(task.recipe.optimizer),
        task.loader(),
        schedulers=make_scheduler(task.learning_rate_share),
        seed=seed,
    )
    if "teacher" in variants:
        losses = [step[TOTAL] for step in history]
        yield _row("teacher", seed, teacher, task, losses, begin_s)
    task = _laid_out(settings, seed, folder)
    for name in variants:
        if name == "teacher":
            continue
        student, begin_s = task.make_model(), process_time()
        losses = _distil(teacher.eval(), student, name, task)
        yield _row(name, seed, student, task, losses, begin_s)


def _laid_out(chosen: Sequence[str], seed: int, folder: Path) -> Task:
    settings = [*chosen, f"training.seed={seed}", f"data.path={folder / 'sst2'}"]
    recipe = resolve(RECIPE, settings, allow_outside=True).recipe
    return make_task(recipe)


def _distil(
    teacher: nn.Module,
    student: nn.Module,
    name: str,
    task: Task,
) -> list[float]:
    """Train a student in this process; return each step's loss."""
    variant = DISTILLED[name]
    loss = hocket.Distillation(TEMPERATURE, variant.soft, variant.hard)
    history = hocket.emulate(
        hocket.Program(
            (hocket.Net("teacher", 1), hocket.Net("student", 1)),
            (hocket.Stage("teacher", 0, trainable=False), hocket.Stage("student", 0)),
            ((0, 1),),
        ),
        {"teacher": teacher, "student": student},
        {"student": with_teachers(loss, ["teacher"])},
        {"student": make_optimizer(task.recipe.optimizer)},
        task.loader(),
        schedulers={"student": make_scheduler(task.learning_rate_share)},
        seed=task.recipe.training.seed,
    )
    return [losses["student"][TOTAL] for losses in history]


def _row(
    name: str,
    seed: int,
    model: nn.Module,
    task: Task,
    losses: list[float],
    begin_s: float,
) -> dict[str, Any]:
    means = evaluated(model, task, evaluation_loader(task.recipe, task.evaluation))
    return {
        "variant": name,
        "seed": seed,
        "num_steps": len(losses),
        "num_samples": len(losses) * task.recipe.training.batch_size,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "value": means["accuracy"],
        "loss": round(means[TOTAL], 5),
        "curve": curve(losses),
        "cpu_s": round(process_time() - begin_s, 1),
    }
