"""How a training run is laid out in steps: how many, and after which to evaluate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice

from hocket.recipes.optimizer import learning_rate_share
from hocket.recipes.recipe import Recipe
from hocket.recipes.samples import Batch, Samples, num_batches, training_batches


@dataclass(frozen=True, slots=True)
class Course:
    """A recipe's training in steps.

    Args:
        recipe: what says so.
        samples: to train on.
        steps_per_epoch: full batches in the samples.
        num_steps: in all.
        evaluate_every_steps: and after the last one.
        learning_rate_share: of each step.
    """

    recipe: Recipe
    samples: Samples
    steps_per_epoch: int
    num_steps: int
    evaluate_every_steps: int
    learning_rate_share: Callable[[int], float]

    @classmethod
    def of(cls, recipe: Recipe, samples: Samples) -> Course:
        """The course that a recipe takes with these samples."""
        training = recipe.training
        per_epoch = num_batches(samples, training.batch_size)
        num_steps = per_epoch * training.num_epochs
        if training.max_steps is not None:
            num_steps = min(num_steps, training.max_steps)
        return cls(
            recipe=recipe,
            samples=samples,
            steps_per_epoch=per_epoch,
            num_steps=num_steps,
            evaluate_every_steps=max(
                1, round(training.evaluate_every_epochs * per_epoch)
            ),
            learning_rate_share=learning_rate_share(recipe.optimizer, num_steps),
        )

    def batches(self) -> Iterator[Batch]:
        """One batch per step, epoch after epoch."""
        return islice(self._endless(), self.num_steps)

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation follows this step."""
        num_done = step + 1
        is_due = num_done % self.evaluate_every_steps == 0
        return is_due or num_done == self.num_steps

    def epoch(self, step: int) -> int:
        """The epoch that a step is part of, from 0."""
        return step // self.steps_per_epoch

    def learning_rate(self, step: int) -> float:
        """What a step's update uses."""
        return self.recipe.optimizer.learning_rate * self.learning_rate_share(step)

    def _endless(self) -> Iterator[Batch]:
        training = self.recipe.training
        for epoch in count():
            yield from training_batches(
                self.samples, training.batch_size, seed=training.seed, epoch=epoch
            )
