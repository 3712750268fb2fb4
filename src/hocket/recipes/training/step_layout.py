"""Lays out a training in steps: how many, and when to evaluate and save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.teacher_settings import TwoViewSettings
from hocket.recipes.training.optimizer import learning_rate_share
from hocket.recipes.two_views import two_view_samples
from hocket.run.data.sample_loader import EvaluationLoader, SampleLoader
from hocket.run.data.samples import Samples
from hocket.teacher.views import TwoViewLoader


@dataclass(frozen=True, slots=True)
class StepLayout:
    """A recipe's training in steps.

    Args:
        recipe: the recipe.
        samples: the samples to train on.
        batches_per_epoch: the full batches in the samples.
        num_steps: the steps of the whole training.
        steps_per_epoch: the steps of an epoch, rounded.
        evaluate_every_steps: the steps between evaluations; the last step has one, too.
        save_every_steps: the steps between checkpoints; None for none but the last.
        learning_rate_share: the share of the highest learning rate, by step.
    """

    recipe: Recipe
    samples: Samples
    batches_per_epoch: int
    num_steps: int
    steps_per_epoch: int
    evaluate_every_steps: int
    save_every_steps: int | None
    learning_rate_share: Callable[[int], float]

    @classmethod
    def of(cls, recipe: Recipe, samples: Samples) -> StepLayout:
        """Return a recipe's layout with these samples."""
        training, checkpoint = recipe.training, recipe.checkpoint
        per_epoch = samples.num_samples // training.batch_size
        num_steps = per_epoch * training.num_epochs // training.accumulate
        if training.max_steps is not None:
            num_steps = min(num_steps, training.max_steps)

        def steps(num_epochs: float) -> int:
            return max(1, round(num_epochs * per_epoch / training.accumulate))

        save_every = checkpoint.every_steps
        if checkpoint.every_epochs is not None:
            save_every = steps(checkpoint.every_epochs)
        return cls(
            recipe=recipe,
            samples=samples,
            batches_per_epoch=per_epoch,
            num_steps=num_steps,
            steps_per_epoch=steps(1.0),
            evaluate_every_steps=training.evaluate_every_steps
            or steps(training.evaluate_every_epochs or 1.0),
            save_every_steps=save_every,
            learning_rate_share=learning_rate_share(recipe.optimizer, num_steps),
        )

    def loader(self) -> SampleLoader:
        """Return a loader of all batches of all steps, epoch after epoch."""
        training, teacher = self.recipe.training, self.recipe.teacher
        make: Callable[..., SampleLoader] = partial(SampleLoader, self.samples)
        if isinstance(teacher, TwoViewSettings):
            make = partial(TwoViewLoader, two_view_samples(self.samples, teacher))
        return make(
            training.batch_size,
            seed=training.seed,
            num_batches=self.num_steps * training.accumulate,
            num_workers=training.num_loaders,
        )

    def evaluation_loader(self, samples: Samples) -> EvaluationLoader:
        """Return a loader of every sample once."""
        training = self.recipe.training
        return EvaluationLoader(
            samples, training.batch_size, num_workers=training.num_loaders
        )

    def evaluates_after(self, step: int) -> bool:
        """Return whether an evaluation follows this step."""
        num_done = step + 1
        return num_done == self.num_steps or num_done % self.evaluate_every_steps == 0

    def saves_after(self, step: int) -> bool:
        """Return whether a checkpoint follows this step."""
        num_done = step + 1
        if num_done == self.num_steps and self.recipe.checkpoint.final:
            return True
        every = self.save_every_steps
        return every is not None and num_done % every == 0

    def epoch(self, step: int) -> int:
        """Return the epoch of a step's first batch, from 0."""
        return step * self.recipe.training.accumulate // self.batches_per_epoch

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step's update."""
        return self.recipe.optimizer.learning_rate * self.learning_rate_share(step)
