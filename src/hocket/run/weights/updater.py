"""Op U: the optimizer's step of one stage, when all its gradients are complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, assert_never, final

import torch
from torch import Tensor, nn

from hocket.errors import ConfigError
from hocket.options import CorrectionName
from hocket.run.weights.correction.correction import Correction, CorrectionState
from hocket.run.weights.correction.weight_prediction import WeightPrediction, moved_by
from hocket.run.weights.reduce import Reducer
from hocket.run.weights.settings import Parameters, TrainingConfig, has_modes

# How long training will be is not known here: this is far beyond the beginning of any,
# where curvature changes fast, and little of all but the shortest.
NUM_DISCOUNTED: Final = 1000


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

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let an optimizer with modes (schedule-free) show its weights for evaluation.

        Afterwards the weights are bit for bit those of before.
        """
        if self.optimizer is None or not has_modes(self.optimizer):
            yield
            return
        modes: Any = self.optimizer
        before = [p.detach().clone() for p in self._trained.values()]
        modes.eval()
        try:
            yield
        finally:
            modes.train()
            for p, value in zip(self._trained.values(), before, strict=True):
                p.data.copy_(value)

    def swap(self) -> None:
        """Exchange the weights and their averages; a second call undoes it.

        Only between steps: no forward may be waiting for its backward.
        """
        assert self.ema is not None
        for name, average in self.ema.items():
            parameter = self._trained[name]
            self.ema[name], parameter.data = parameter.data, average


def make_correction(
    name: CorrectionName,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    delay: int,
    *,
    num_discounted_updates: int | None = None,
) -> Correction | None:
    """Make a stage's correction; None if none of its weights is stale.

    Args:
        name: the correction's name.
        parameters: the stage's trained parameters, by the uncut model's names.
        optimizer: the stage's optimizer.
        delay: the stage's delay in updates.
        num_discounted_updates: the updates over which a discount fades; a usual number
            when not given.

    Raises:
        ConfigError: the optimizer has no learning rate to discount.
    """
    if not delay:
        return None
    match name:
        case "none":
            return None
        case "error-feedback":
            return ErrorFeedback(parameters, delay)
        case "weight-prediction":
            return WeightPrediction(parameters, optimizer, delay)
        case "lr-discount":
            num_updates = num_discounted_updates or NUM_DISCOUNTED
            return LrDiscount(optimizer, delay, num_updates)
        case _:
            assert_never(name)


# Update `t` should have used the gradient at `W(t)`, and used the one at `W(t-d)`.
# Update `t + d` is the one that uses the gradient at `W(t)`. So by then it is known,
# but for the batch, what update `t` should have been; the difference is added:
#
#     u(t)     what the optimizer would add to the weights, from the gradient at W(t-d)
#     e(t)  =  u(t) - u(t-d)       the error that update t-d made
#     W(t+1) = W(t) + u(t) + e(t)
#
# Each update is thus applied twice, and once taken back `d` updates later. What has
# been applied is the sum of all `u` and the last `d` of them once more: nothing is
# lost, and nothing piles up. Before the first update there was none: `u(t) = 0` for `t
# < 0`.
@final
class ErrorFeedback(Correction):
    """Adds the error of the update `delay` updates ago to each update.

    Works on what an optimizer does to the weights, so with any optimizer. Keeps `delay`
    tensors like the weights, and one more while it updates.

    Source: after Zmushko et al., arXiv:2606.30634, which names the idea: error feedback
    for a delay of 1, with any optimizer. Only its abstract was available: the form
    above, the extension to longer delays and the first updates are ours.

    Args:
        parameters: the stage's trained parameters, by name.
        delay: the stage's delay in updates, above 0.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], delay: int) -> None:
        self._parameters = parameters
        self._num_updates = 0
        self._updates: dict[str, deque[Tensor]] = {
            name: deque(maxlen=delay) for name in parameters
        }

    def step(self, step: Callable[[], object]) -> None:
        """Update, and correct an earlier update."""
        for name, update in moved_by(step, self._parameters).items():
            earlier = self._updates[name]
            error = update - earlier[0] if len(earlier) == earlier.maxlen else update
            self._parameters[name].detach().add_(error)
            earlier.append(update)  # and the oldest is forgotten
        self._num_updates += 1

    def predicted(self) -> None:
        """Return None: forwards read the weights as they are."""

    def state_dict(self) -> CorrectionState:
        """Return the last `delay` updates of each parameter."""
        return {
            "num_updates": self._num_updates,
            "kept": {name: list(kept) for name, kept in self._updates.items()},
        }

    def load_state_dict(self, state: CorrectionState) -> None:
        """Restore a state; fewer updates mean that training began recently."""
        self._num_updates = state["num_updates"]
        for name, kept in self._updates.items():
            kept.clear()
            kept.extend(x.clone() for x in state["kept"].get(name, []))


# On a quadratic of curvature `c`, gradient descent of rate `lr` is stable for `lr * c`
# up to 2 without a delay, and up to `2 sin(pi / (2 (2 d + 1)))` with one: 1, 0.62, 0.45
# for `d` = 1, 2, 3. That is about `2 / (1 + d)`.
@final
class LrDiscount(Correction):
    """Divides the learning rates by `(1 + delay) ** (1 - t / n)` at update `t`.

    From update `n` on they are what the optimizer and its schedule say. Nothing else
    sees the discounted rates: they are put back before the schedule steps. Keeps one
    number.

    Source: after Yang et al., "PipeMare", arXiv:1910.05124, technique 1, known here
    from descriptions: `lr / tau ** (1 - min(t / n, 1))`, with an `n` that follows from
    the first part of training, before the rate falls. Ours is `1 + delay` for `tau`,
    which would not discount a delay of 1.

    Args:
        optimizer: its parameter groups have a rate `lr`.
        delay: the stage's delay in updates, above 0.
        num_updates: `n`, the updates over which the discount fades; 1 or more.

    Raises:
        ConfigError: a group has none.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        delay: int,
        num_updates: int = NUM_DISCOUNTED,
    ) -> None:
        for group in optimizer.param_groups:
            if not isinstance(group.get("lr"), int | float | Tensor):
                raise ConfigError(
                    f"correction='lr-discount' needs learning rates, and "
                    f"{type(optimizer).__name__} has lr={group.get('lr')!r}: give it "
                    "one, or take correction='error-feedback'"
                )
        self._optimizer = optimizer
        self._delay = delay
        self._num_discounted = num_updates
        self._num_updates = 0

    def step(self, step: Callable[[], object]) -> None:
        """Update with smaller rates."""
        left = 1.0 - min(self._num_updates / self._num_discounted, 1.0)
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] / (1 + self._delay) ** left
        try:
            step()
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        self._num_updates += 1

    def predicted(self) -> None:
        """Return None: forwards read the weights as they are."""

    def state_dict(self) -> CorrectionState:
        """Return the number of updates."""
        return {"num_updates": self._num_updates, "kept": {}}

    def load_state_dict(self, state: CorrectionState) -> None:
        """Restore the number of updates."""
        self._num_updates = state["num_updates"]


class GradientSums:
    """The sum of each parameter's gradients.

    Args:
        sums: what was added up before, by name.
    """

    def __init__(self, sums: Mapping[str, Tensor]) -> None:
        self.sums = dict(sums)

    def add(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add the gradients with which parameters are about to be updated."""
        for name, parameter in parameters.items():
            if parameter.grad is None:
                continue
            if name in self.sums:
                self.sums[name] += parameter.grad
            else:
                self.sums[name] = parameter.grad.detach().clone()

    def norms(self) -> dict[str, float]:
        """Return the 1-norm of each sum."""
        return {name: x.double().abs().sum().item() for name, x in self.sums.items()}
