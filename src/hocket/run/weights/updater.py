"""Op U: the optimizer's step of one stage, when all its gradients are complete."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import ConfigError
from hocket.model.trace.local import is_sharded, local, reduce_gradient
from hocket.run.stage.precision import LossScale
from hocket.run.weights.masters import Masters
from hocket.run.weights.optimizer_check import OptimizerCheck
from hocket.run.weights.reduce import GradientSum
from hocket.run.weights.settings import Parameters, TrainingConfig, has_modes


class Updater:
    """Updates one stage's weights, and their averages if there are any.

    Args:
        parameters: the parameters that this stage owns, by the uncut model's names.
        settings: makes the optimizer and the learning-rate schedule.
        reducer: sums the gradients over the stage's replicas, if there are any.
        whole: all parameters of its net; not given: of no interest.
        optimizer: the one that is made already; else `settings` make it.
        models: the model's own parameters, of which these are shards or masters.
        masters: those of the stage's weights.

    Attributes:
        optimizer: the optimizer; None if nothing is trained.
        scheduler: the learning-rate schedule.
        scheduled_rates: the learning rate of each group as it was made, loaded or last
            scheduled; the live ones differ where the user has changed them.
        masters: those of the stage's weights.
        gradient_sums: adds up the gradients of all updates, if it was asked for.
        ema: the averaged weights by name. They start as the first weights, and each
            update moves them by `1 - ema_decay` of the way to the new ones.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        settings: TrainingConfig,
        *,
        reducer: GradientSum | None = None,
        whole: Mapping[str, nn.Parameter] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        models: Mapping[str, nn.Parameter] | None = None,
        masters: Masters | None = None,
    ) -> None:
        self.parameters = parameters
        self.masters = Masters(()) if masters is None else masters
        self.reducer = reducer
        trained = Parameters(parameters)
        self._trained = dict(trained.named())
        self.optimizer = optimizer
        if trained and optimizer is None:
            self.optimizer = (
                settings.make_optimizer(trained)
                if whole is None
                else settings.make_stage_optimizer(trained, Parameters(whole))
            )
        self._parallel = [p for p in self._trained.values() if is_sharded(p)]
        known = whole or self._trained
        self._check = OptimizerCheck(self.optimizer, known, models or {})
        self.scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
        if self.optimizer is not None:
            self.scheduler = settings.make_scheduler(self.optimizer)
        self.scheduled_rates = self.rates()
        self.gradient_sums: GradientSums | None = None
        self._decay = settings.ema_decay
        self.ema: dict[str, Tensor] | None = None
        if self._decay is not None:
            self.ema = {name: p.detach().clone() for name, p in trained.named()}

    @property
    def grads(self) -> list[Tensor]:
        """The gradients of all parameters that have one: the parts that are here."""
        return [local(p.grad) for p in self._trained.values() if p.grad is not None]

    def rates(self) -> list[float]:
        """Return the learning rate of each group; 0 for groups that have none."""
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        return [float(group.get("lr") or 0.0) for group in groups]

    def clip(self, clip_norm: float | None, scale: LossScale | None) -> Tensor:
        """Unscale and clip the gradients of a model that is here as a whole.

        Args:
            clip_norm: the most that they may measure together.
            scale: the loss scale, for float16.

        Returns:
            What they measured before, on their device.
        """
        if scale is not None:
            scale.unscale(self.grads)
        norm = nn.utils.get_total_norm(self.grads)
        if clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self._trained.values(), clip_norm, norm)
        return norm

    def take_gradients(self) -> None:
        """Take gradients that are complete on this worker."""
        for p in self._parallel:
            reduce_gradient(p)
        self.masters.take_gradients()

    def wait(self) -> None:
        """Wait until the gradients are complete over all replicas.

        Raises:
            WaitError: the reduction did not end within its timeout.
        """
        if self.reducer is not None:
            self.reducer.finish()

    @property
    def can_be_masked(self) -> bool:
        """Whether the device itself can leave out the next update.

        The fused kernels of torch's optimizers can, as `GradScaler` asks them to. In
        the first update they make state, which must not be left out.
        """
        optimizer: Any = self.optimizer
        if optimizer is None:
            return True
        return (
            self.gradient_sums is None
            and getattr(optimizer, "_step_supports_amp_scaling", False)
            and all(group.get("fused") for group in optimizer.param_groups)
            and all(
                group.get("momentum") == 0.0 or p in optimizer.state
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None
            )
        )

    def update(self, is_bad: Tensor | None = None) -> None:
        """Step the optimizer, and clear the gradients.

        Args:
            is_bad: 1 on the device to leave weights, moments and averages as they are,
                where `can_be_masked`; 0 to change them, as without it.
        """
        optimizer: Any = self.optimizer
        if self.gradient_sums is not None:
            self.gradient_sums.add(self._trained)
        self.masters.follow()
        if optimizer is not None:
            with self._check.stepping():
                if is_bad is not None:
                    optimizer.found_inf, optimizer.grad_scale = is_bad, None
                optimizer.step()
                if is_bad is not None:
                    del optimizer.found_inf, optimizer.grad_scale
            clear_gradients(optimizer)
        self.masters.write()
        self.advance(is_bad)
        self.forget()

    def advance(self, is_bad: Tensor | None = None) -> None:
        """Step the learning-rate schedule and the averages, behind an update."""
        if self.scheduler is not None:
            self.scheduler.step()
            self.scheduled_rates = self.rates()
        self.average(is_bad)

    def average(self, is_bad: Tensor | None = None) -> None:
        """Move the averages towards the weights, if there are any; see `update`."""
        if not self.ema or self._decay is None:
            return
        old, share = [*map(local, self.ema.values())], 1.0 - self._decay
        new = [local(self._trained[name].detach()) for name in self.ema]
        if is_bad is None:
            torch._foreach_lerp_(old, new, share)
        else:
            moves = torch._foreach_sub(new, old)
            torch._foreach_mul_(moves, (1.0 - is_bad.double()) * share)
            torch._foreach_add_(old, moves)

    def hold_frozen(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Keep averages of frozen parameters, which this updater does not update."""
        self._trained |= parameters
        if self.ema is not None:
            self.ema |= {name: p.detach().clone() for name, p in parameters.items()}

    def forget(self) -> None:
        """Clear all gradients, also those that the optimizer does not update."""
        self.masters.take_gradients()
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
        self.masters.write()
        try:
            yield
        finally:
            modes.train()
            for p, value in zip(self._trained.values(), before, strict=True):
                local(p.detach()).copy_(local(value))
            self.masters.write()

    def swap(self) -> None:
        """Exchange the weights and their averages; a second call undoes it.

        Only between steps: no forward may be waiting for its backward.
        """
        assert self.ema is not None
        for name, average in self.ema.items():
            parameter = self._trained[name]
            if is_sharded(parameter):  # which ignores an assignment to `data`
                weights = parameter.detach().clone()
                local(parameter.detach()).copy_(local(average))
                self.ema[name] = weights
            else:
                self.ema[name], parameter.data = parameter.data, average
        self.masters.write()


@contextmanager
def averaged(
    updaters: Collection[Updater], run: str, *, is_used: bool = True
) -> Iterator[None]:
    """Put averaged weights in the place of the trained ones for a while.

    Args:
        updaters: all that update the weights.
        run: what keeps the averages, for errors.
        is_used: False to leave the trained ones, as they are evaluated.

    Raises:
        ConfigError: there are no averages.
    """
    if not is_used:
        with ExitStack() as stack:
            for updater in updaters:
                stack.enter_context(updater.evaluating())
            yield
        return
    if any(updater.ema is None for updater in updaters):
        raise ConfigError(
            f"there are no averaged weights: make the {run} with ema_decay=0.999 or "
            "another decay"
        )
    for updater in updaters:
        updater.swap()
    try:
        yield
    finally:
        for updater in updaters:
            updater.swap()


def clear_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Call a `zero_grad()` that is not torch's own, as a loop does behind an update.

    Raises:
        ConfigError: it keeps gradients.
    """
    known = torch.optim.Optimizer.zero_grad
    if getattr(optimizer.zero_grad, "__func__", None) is known:
        return
    optimizer.zero_grad()
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    left = [float(p.grad.norm()) for p in trained if p.grad is not None]
    if any(left):
        raise ConfigError(
            f"{type(optimizer).__name__}.zero_grad() keeps gradients behind the update "
            f"(one of norm {max(left):.6g}), and here each step begins without any: "
            "let step() keep them in the optimizer's state, or zero_grad() clear them; "
            "to add up several batches, accumulate="
        )


def refuse_modes(updaters: Mapping[int, Updater], why: str) -> None:
    """Refuse optimizers with other weights to evaluate.

    Args:
        updaters: this worker's, by stage.
        why: what goes wrong with one, and what to do.

    Raises:
        ConfigError: there is one.
    """
    made = (x.optimizer for x in updaters.values())
    if any(x is not None and has_modes(x) for x in made):
        raise ConfigError(
            "the optimizer has weights to train and others to evaluate (train(), "
            f"eval()), and {why}, or another optimizer"
        )


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
