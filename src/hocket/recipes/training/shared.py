"""Trains a recipe as a job that shares its device: a plain loop, without stages.

    batches    batch, batch, ... ─▶ evaluation's batches ─▶ checkpoint ─▶ batch, ...
    gates      │      │             │      │                              │
               └ each one is an iteration of the job

It writes the same files as `hocket train`: metrics and checkpoints. Both commands can
resume from a checkpoint of the other.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, nan
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.errors import NonFiniteError, RecipeError
from hocket.model.trace.observe import in_mode
from hocket.options import SHORT_WEIGHTS, UpdateOptions
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.objectives import WholeEvaluation, evaluation_loader
from hocket.recipes.training.optimizer import make_optimizer, make_scheduler
from hocket.recipes.training.records import refuse_failures
from hocket.recipes.training.run_folder import NEWEST, resume_point
from hocket.recipes.training.saving import RecipeRun
from hocket.recipes.training.task import make_task
from hocket.run.checkpoint.manager import CheckpointManager
from hocket.run.checkpoint.saved_run import WholeModel
from hocket.run.cluster.world import single_process_world
from hocket.run.data.batch import call_arguments, count_samples, on_device, split_batch
from hocket.run.data.loss import TOTAL, losses_of
from hocket.run.data.metrics import DeviceSums, EvaluationResult, EvaluationSums
from hocket.run.device.memory import peak_bytes
from hocket.run.weights.settings import TrainingConfig
from hocket.run.weights.updater import Updater, averaged
from hocket.sharing.running.job import Job, JobContext
from hocket.sharing.waves.player import add_part
from hocket.signatures import values_of


def recipe_job(recipe: Recipe, run_dir: Path, job: Job) -> Job:
    """Return a job that trains a recipe's model to its end.

    A plain loop over the recipe's batches, with its loss, its optimizer and its rates.
    Dropout draws from the job's random state, and not by layer as a pipeline does.

    Args:
        recipe: the recipe.
        run_dir: the run's own folder, with the recipe in it.
        job: its name, weight and limits; `make`, `seed` and `folder` are replaced.
    """
    make = partial(train_recipe, recipe.model_dump_json(), str(run_dir))
    return replace(job, make=make, seed=recipe.training.seed, folder=run_dir)


def refuse_unshared(recipe: Recipe) -> None:
    """Refuse a recipe that freezes layers, or has a teacher or masters.

    Raises:
        RecipeError: says what.
    """
    own = "or write the loop as a hocket.Job"
    if recipe.freeze is not None and recipe.freeze.policy != "none":
        raise RecipeError(
            "hocket share trains recipes by a plain loop, which freezes no layers: "
            f"give --set freeze.policy=none, {own}"
        )
    if recipe.training.precision == SHORT_WEIGHTS:
        raise RecipeError(
            "hocket share updates the weights of recipes themselves, without float32 "
            f"masters: give --set training.precision=bfloat16, {own}"
        )
    if recipe.teacher is not None:
        raise RecipeError(f"hocket share trains recipes without a [teacher]; {own}")


def train_recipe(
    text: str, run_dir: str, context: JobContext
) -> tuple[Any, Iterator[Any]]:
    """Make the loop of a recipe; a process of its own imports this function.

    Args:
        text: the recipe as JSON.
        run_dir: the run's folder.
        context: the job's.
    """
    run = _Run(Recipe.model_validate_json(text), Path(run_dir), context)
    return run.step, run.batches()


@dataclass(frozen=True, slots=True)
class _EvaluationBatch:
    """A batch to evaluate on."""

    batch: Any


class _Run(RecipeRun):
    """Trains a recipe, one batch at a time, and writes the files of the run."""

    def __init__(self, recipe: Recipe, run_dir: Path, context: JobContext) -> None:
        task = make_task(recipe)
        super().__init__(task, run_dir)
        self.training, self.context = recipe.training, context
        self.model = task.make_model().to(context.device).train()
        settings = TrainingConfig(
            optimizer=make_optimizer(recipe.optimizer),
            scheduler=make_scheduler(task.learning_rate_share),
            **values_of(UpdateOptions, recipe.training),
        )
        self.precision = settings.compute_precision
        self.scale = self.precision.make_scale(context.device)
        named = self.model.named_parameters()
        self.updater = Updater({n: p for n, p in named if p.requires_grad}, settings)
        world = single_process_world(context.device)
        scaler = None if self.scale is None else self.scale.scaler
        seed = recipe.training.seed
        saved = WholeModel(self.model, self.updater, scaler, seed, world)
        self.checkpoints = CheckpointManager(saved, None, timeout_s=world.timeout_s)
        self.losses: dict[str, float] = {}  # sums over the batches of a step
        self.num_batches = self.num_samples = 0  # of a step
        self.seconds = 0.0
        self.sums = DeviceSums(task.metrics)
        self.outputs: list[Any] = []  # of an evaluation that needs all together
        start = resume_point(run_dir, recipe.checkpoint, is_restart=False)
        if start is not None:
            previous = recipe.checkpoint.allow_previous
            loaded = self.checkpoints.load(*start, allow_previous=previous)
            self.load_state_dict(loaded.data)

    def batches(self) -> Iterator[Any]:
        """Yield what `step` is to train or evaluate on, and save between steps."""
        with ExitStack() as stack:
            stack.callback(self.checkpoints.release)
            stack.callback(self.watchers.close)
            self.watch(goes_on=self.recipe.checkpoint.resume == NEWEST)
            self.start_clock()
            stops = False
            for batch in self.loader:
                yield batch
                if self.num_batches == self.training.accumulate:
                    stops = yield from self._between_steps()
                if stops:
                    break
            if self.last is None:  # a run that resumed after its last step
                yield from self._evaluation_batches()
                self.report_evaluation(self._evaluated())
            self.report_summary()
            self.checkpoints.finish()
        refuse_failures(self.watchers.failures)

    def _between_steps(self) -> Generator[_EvaluationBatch, None, bool]:
        """Report the step that has ended, evaluate and save; return whether to stop.

        Its seconds include waits at gates; its peak is that of all jobs of the process.
        """
        step, stops = self.totals.num_steps, False
        self.report_step(
            step,
            num_samples=self.num_samples,
            seconds=self.seconds,
            loss=self.losses[TOTAL],
            losses=self.losses,
            bubble_fraction=nan,
            grad_norm=self.norm,
            peak_bytes=peak_bytes(self.context.device),
            is_skipped=not isfinite(self.norm),
        )
        self.losses, self.num_batches, self.num_samples = {}, 0, 0
        self.seconds = 0.0
        if self.task.evaluates_after(step):
            yield from self._evaluation_batches()
            evaluation = self._evaluated()
            self.report_evaluation(evaluation)
            stops = self.early_stop.stops_after(evaluation, self.training)
        settings = self.recipe.checkpoint
        if self.saves_after(step, stops=stops):
            self.checkpoints.save(
                self.checkpoints_dir,
                step + 1,
                data=self.state_dict(),
                background=settings.background,
                keep=settings.keep,
            )
        return stops

    def step(self, batch: Any) -> Tensor | None:
        """Train on a batch and update after `accumulate` of them, or evaluate on it."""
        if isinstance(batch, _EvaluationBatch):
            self.context.kind = "evaluation"
            self._evaluate(batch.batch)
            return None
        begin_s = perf_counter()
        accumulate = self.training.accumulate
        inputs, targets = on_device(batch, self.context.device)
        args, kwargs = call_arguments(inputs)
        autocast = self.precision.autocast(self.context.device, caches=False)
        with self.context.forward(), autocast:
            losses = losses_of(self.task.loss, self.model(*args, **kwargs), targets)
        with self.context.backward():
            factor = 1.0 if self.scale is None else self.scale.value
            (losses[TOTAL] * factor / accumulate).backward()
        for name, loss in losses.items():
            part = float(loss.detach()) / accumulate
            self.losses[name] = self.losses.get(name, 0.0) + part
        self.num_batches += 1
        self.num_samples += count_samples(batch)
        if self.num_batches == accumulate:
            self.context.kind = "update"
            self._update()
        self.seconds += perf_counter() - begin_s
        return losses[TOTAL].detach()

    def _update(self) -> None:
        """Clip the gradients and update; skip it where float16 has overflowed.

        Raises:
            NonFiniteError: a gradient is not finite.
        """
        self.norm = float(self.updater.clip(self.training.clip_norm, self.scale))
        is_finite = isfinite(self.norm)
        if self.scale is not None:
            self.scale.update(overflowed=not is_finite)
        elif not is_finite:
            raise NonFiniteError(
                f"the gradients of step {self.totals.num_steps} are not "
                f"finite (their norm is {self.norm}), and no weight was updated from "
                "them: lower the learning rate, or clip with training.clip_norm"
            )
        if is_finite:
            self.updater.update()
        else:
            self.updater.forget()

    def _evaluation_batches(self) -> Iterator[_EvaluationBatch]:
        loader = evaluation_loader(self.recipe, self.task.evaluation)
        return map(_EvaluationBatch, loader)

    def _evaluate(self, batch: Any) -> None:
        """Add a batch to the evaluation, with the averaged weights if there are any."""
        spec = pytree.tree_structure(call_arguments(batch[0]))
        (part,) = split_batch(on_device(batch, self.context.device), 1)
        has_averages = self.updater.ema is not None
        with (
            averaged([self.updater], "recipe", is_used=has_averages),
            self.context.forward(),
            in_mode(self.model, training=False),
            torch.no_grad(),
        ):
            output = add_part(
                self.model, self.task.loss, self.precision, part, spec, self.sums
            )
        with self.context.backward():  # tick-tock needs one for each forward
            pass
        if self.task.evaluate is not None:
            self.outputs.append(pytree.tree_map(Tensor.cpu, output))

    def _evaluated(self) -> EvaluationResult:
        """Return the evaluation that has ended, and begin to sum the next one up."""
        if isinstance(self.task.evaluate, WholeEvaluation):
            outputs = pytree.tree_map(lambda *x: torch.cat(x), *self.outputs)
            result = self.task.evaluate.of_outputs(outputs)
        else:
            result = EvaluationSums([self.sums.read()], self.sums.error).result()
        self.sums, self.outputs = DeviceSums(self.task.metrics), []
        return result
