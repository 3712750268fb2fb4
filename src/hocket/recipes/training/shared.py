"""A recipe as a job that shares its device: the plain loop, marked for its gates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from hocket.errors import RecipeError
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.training.optimizer import make_optimizer, make_scheduler
from hocket.recipes.training.step_layout import StepLayout
from hocket.recipes.training.task import make_task
from hocket.run.data.batch import call_arguments, on_device
from hocket.run.data.loss import TOTAL, losses_of
from hocket.sharing.running.job import Job, JobContext

_HALF_PRECISIONS: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def recipe_job(recipe: Recipe, job: Job) -> Job:
    """Return a job that trains a recipe's model to its end.

    A plain loop over the recipe's batches, with its loss, its optimizer and its rates.
    Dropout draws from the job's random state, and not by layer as a pipeline does.

    Args:
        recipe: the recipe.
        job: its name, weight and limits; `make` and `seed` are replaced.

    Raises:
        RecipeError: the recipe asks for what a shared loop does not do.
    """
    _refuse(recipe)
    make = partial(train_recipe, recipe.model_dump_json())
    return replace(job, make=make, seed=recipe.training.seed)


def train_recipe(text: str, context: JobContext) -> tuple[Any, Iterator[Any]]:
    """Make the loop of a recipe; a process of its own imports this function.

    Args:
        text: the recipe as JSON.
        context: the job's.
    """
    recipe = Recipe.model_validate_json(text)
    task = make_task(recipe)
    layout = StepLayout.of(recipe, task.training)
    model = task.make_model().to(context.device).train()
    trained = _Loop(recipe, layout, model, task.loss, context)
    return trained.step, iter(layout.loader())


def _refuse(recipe: Recipe) -> None:
    training = recipe.training
    freezes = recipe.freeze is not None and recipe.freeze.policy != "none"
    asked = {
        "training.ema_decay=": training.ema_decay is not None,
        "training.stop_patience=": training.stop_patience is not None,
        "checkpoint.every_steps=": recipe.checkpoint.every_steps is not None,
        "checkpoint.every_epochs=": recipe.checkpoint.every_epochs is not None,
        "freeze.policy=none": freezes,
    }
    found = [f"--set {setting}" for setting, is_asked in asked.items() if is_asked]
    if found:
        raise RecipeError(
            "hocket share trains recipes by a plain loop, which saves no checkpoints, "
            f"averages no weights and freezes no layers: give {' '.join(found)}, or "
            "write the loop as a hocket.Job"
        )
    if recipe.teacher is not None:
        raise RecipeError(
            "hocket share trains recipes without a [teacher]; write the loop as a "
            "hocket.Job"
        )


class _Loop:
    """Trains one batch at a time; updates after every `accumulate` of them."""

    def __init__(
        self,
        recipe: Recipe,
        layout: StepLayout,
        model: nn.Module,
        loss: Any,
        context: JobContext,
    ) -> None:
        self.training = recipe.training
        self.model, self.loss, self.context = model, loss, context
        self.optimizer = make_optimizer(recipe.optimizer)(model.parameters())
        self.scheduler = make_scheduler(layout.learning_rate_share)(self.optimizer)
        kind, half = (
            context.device.type,
            _HALF_PRECISIONS.get(recipe.training.precision),
        )
        # torch's cache of casts is one for all threads, and any of them empties it.
        self.autocast = partial(
            torch.autocast,
            kind,
            dtype=half,
            enabled=half is not None,
            cache_enabled=False,
        )
        self.scaler = torch.amp.GradScaler(kind, enabled=half is torch.float16)
        self.num_batches = 0

    def step(self, batch: Any) -> Tensor:
        inputs, targets = on_device(batch, self.context.device)
        args, kwargs = call_arguments(inputs)
        with self.context.forward(), self.autocast():
            loss = losses_of(self.loss, self.model(*args, **kwargs), targets)[TOTAL]
        with self.context.backward():
            self.scaler.scale(loss / self.training.accumulate).backward()
        self.num_batches += 1
        if self.num_batches % self.training.accumulate == 0:
            self._update()
        return loss.detach()

    def _update(self) -> None:
        if self.training.clip_norm is not None:
            norm = self.training.clip_norm
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
