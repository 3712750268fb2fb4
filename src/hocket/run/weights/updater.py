"""Op U: the optimizer's step of one stage, when all its gradients are complete."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hocket.run.weights.correction.correction import Correction
from hocket.run.weights.correction.make import make_correction
from hocket.run.weights.gradient_sums import GradientSums
from hocket.run.weights.reduce import Reducer
from hocket.run.weights.settings import Parameters, TrainingConfig


class Updater:
    """Updates one stage's weights, and their averages if there are any.

    Args:
        parameters: the parameters that this stage owns, by the uncut model's names.
        settings: makes the optimizer and the learning-rate schedule.
        reducer: sums the gradients over the stage's replicas, if there are any.
        delay: the stage's delay: by how many updates its gradients are stale.

    Attributes:
        optimizer: the optimizer; None if nothing is trained.
        scheduler: the learning-rate schedule.
        scheduled_rates: the learning rate of each group as it was made, loaded or last
            scheduled; the live ones differ where the user has changed them.
        correction: the correction of stale gradients; None without a delay.
        gradient_sums: adds up the gradients of all updates, if it was asked for.
        ema: the averaged weights by name. They start as the first weights, and each
            update moves them by `1 - ema_decay` of the way to the new ones.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        settings: TrainingConfig,
        *,
        reducer: Reducer | None = None,
        delay: int = 0,
    ) -> None:
        self.parameters = parameters
        self.reducer = reducer
        trained = Parameters(parameters)
        self._trained = dict(trained.named())
        self.optimizer = settings.make_optimizer(trained) if trained else None
        self.scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
        self.correction: Correction | None = None
        if self.optimizer is not None:
            self.scheduler = settings.make_scheduler(self.optimizer)
            self.correction = make_correction(
                settings.correction,
                self._trained,
                self.optimizer,
                delay,
                num_discounted_updates=settings.num_discounted_updates,
            )
        self.scheduled_rates = self.rates()
        self.gradient_sums: GradientSums | None = None
        self._decay = settings.ema_decay
        self.ema: dict[str, Tensor] | None = None
        if self._decay is not None:
            self.ema = {name: p.detach().clone() for name, p in trained.named()}

    @property
    def grads(self) -> list[Tensor]:
        """The gradients of all parameters that have one."""
        return [p.grad for p in self._trained.values() if p.grad is not None]

    def rates(self) -> list[float]:
        """Return the learning rate of each group; 0 for groups that have none."""
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        return [float(group.get("lr") or 0.0) for group in groups]

    def wait(self) -> None:
        """Wait until the gradients are complete over all replicas.

        Raises:
            WaitError: the reduction did not end within its timeout.
        """
        if self.reducer is not None:
            self.reducer.finish()

    def update(self) -> None:
        """Step the optimizer, and clear the gradients."""
        if self.gradient_sums is not None:
            self.gradient_sums.add(self._trained)
        if self.optimizer is not None:
            step = self.optimizer.step
            step() if self.correction is None else self.correction.step(step)
        self.advance()
        self.forget()

    def advance(self) -> None:
        """Step the learning-rate schedule and the averages, behind an update."""
        if self.scheduler is not None:
            self.scheduler.step()
            self.scheduled_rates = self.rates()
        self.average()

    def average(self) -> None:
        """Move the averages towards the weights, if there are any."""
        if self.ema and self._decay is not None:
            new = [self._trained[name].detach() for name in self.ema]
            torch._foreach_lerp_(list(self.ema.values()), new, 1.0 - self._decay)

    def hold_frozen(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Keep averages of frozen parameters, which this updater does not update."""
        self._trained |= parameters
        if self.ema is not None:
            self.ema |= {name: p.detach().clone() for name, p in parameters.items()}

    def predicted(self) -> dict[str, Tensor] | None:
        """Return the values that forwards read in place of the present weights.

        Returns:
            Tensors of their own, by name, of every trained parameter; or None if
            forwards read the weights themselves.
        """
        return None if self.correction is None else self.correction.predicted()

    def forget(self) -> None:
        """Clear all gradients, also those that the optimizer does not update."""
        for parameter in self._trained.values():
            parameter.grad = None

    def swap(self) -> None:
        """Exchange the weights and their averages; a second call undoes it.

        Only between steps: no forward may be waiting for its backward.
        """
        assert self.ema is not None
        for name, average in self.ema.items():
            parameter = self._trained[name]
            self.ema[name], parameter.data = parameter.data, average
