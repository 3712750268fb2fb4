"""Lays out a training in steps: how many, and when to evaluate and save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.settings import TwoViewSettings
from hocket.recipes.objectives import two_view_samples
from hocket.recipes.training.optimizer import learning_rate_share
from hocket.run.data.sample_loader import SampleLoader
from hocket.run.data.samples import Samples
from hocket.teacher.views import TwoViewLoader


@dataclass(frozen=True)
class StepLayout:
    """A recipe's training in steps.

    Args:
        recipe: the recipe.
        samples: the samples to train on.
    """

    recipe: Recipe
    samples: Samples

    @property
    def batches_per_epoch(self) -> int:
        """The full batches in the samples."""
        return self.samples.num_samples // self.recipe.training.batch_size

    @property
    def num_steps(self) -> int:
        """The steps of the whole training."""
        training = self.recipe.training
        num_batches = self.batches_per_epoch * training.num_epochs
        num_steps = num_batches // training.accumulate
        return min(num_steps, training.max_steps or num_steps)

    def steps_in(self, num_epochs: float = 1.0) -> int:
        """Return the steps of so many epochs, rounded, and at least one."""
        num_batches = num_epochs * self.batches_per_epoch
        return max(1, round(num_batches / self.recipe.training.accumulate))

    @cached_property
    def learning_rate_share(self) -> Callable[[int], float]:
        """The share of the highest learning rate, by step."""
        return learning_rate_share(self.recipe.optimizer, self.num_steps)

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

    def evaluates_after(self, step: int) -> bool:
        """Return whether an evaluation follows this step, as it does the last one."""
        training = self.recipe.training
        num_done, every = step + 1, training.evaluate_every_steps
        every = every or self.steps_in(training.evaluate_every_epochs or 1.0)
        return num_done == self.num_steps or num_done % every == 0

    def saves_after(self, step: int) -> bool:
        """Return whether a checkpoint follows this step."""
        num_done, settings = step + 1, self.recipe.checkpoint
        if num_done == self.num_steps and settings.final:
            return True
        every = settings.every_steps
        if settings.every_epochs is not None:
            every = self.steps_in(settings.every_epochs)
        return every is not None and num_done % every == 0

    def epoch(self, step: int) -> int:
        """Return the epoch of a step's first batch, from 0."""
        return step * self.recipe.training.accumulate // self.batches_per_epoch

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step's update."""
        return self.recipe.optimizer.learning_rate * self.learning_rate_share(step)
