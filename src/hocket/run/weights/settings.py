"""How the parameters of a net are updated: optimizer, schedule, clipping, averages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from hocket.errors import ConfigError
from hocket.model.profile.optimizer_bytes import optimizer_bytes
from hocket.options import UpdateOptions, faults_of
from hocket.run.stage.precision import Precision
from hocket.signatures import function_fault


class Parameters(list[nn.Parameter]):
    """One stage's trained parameters: a list of them, with their names.

    `for p in parameters` and `torch.optim.AdamW(parameters)` see parameters;
    `parameters.named()` is for groups by name.
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        """Keep the ones that want a gradient, in their order."""
        trained = {name: p for name, p in named.items() if p.requires_grad}
        super().__init__(trained.values())
        self._names = tuple(trained)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return pairs of names and parameters, as `model.named_parameters()` does."""
        return list(zip(self._names, self, strict=True))


OptimizerFactory = Callable[[Parameters], torch.optim.Optimizer]
SchedulerFactory = Callable[
    [torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig(UpdateOptions):
    """How the parameters of a net are updated.

    Args:
        optimizer: called on each stage with its parameters, a list that also has
            `named()`, for groups by name.
        scheduler: makes each stage's learning-rate schedule; stepped at every update.

    Raises:
        ConfigError: an option is not valid; names all such options.
    """

    optimizer: OptimizerFactory
    scheduler: SchedulerFactory | None = None

    def __post_init__(self) -> None:
        faults = [*faults_of(self), *self._factory_faults()]
        if faults:
            raise ConfigError("; ".join(faults))

    def _factory_faults(self) -> Iterator[str]:
        """Yield what is wrong with the functions that make optimizers and schedules."""
        optimizer: object = self.optimizer
        if isinstance(optimizer, torch.optim.Optimizer):
            yield (
                f"optimizer is {type(optimizer).__name__}, made already: each stage "
                "makes its own, so give a function of the parameters, such as "
                f"`lambda p: torch.optim.{type(optimizer).__name__}(p, ...)`"
            )
        elif fault := function_fault(
            "optimizer must be a function that makes an optimizer, given parameters",
            optimizer,
            "lambda p: torch.optim.AdamW(p, 3e-4)",
        ):
            yield fault
        if self.scheduler is not None and (
            fault := function_fault(
                "scheduler must be a function that makes a learning-rate schedule, "
                "given an optimizer",
                self.scheduler,
                "lambda o: torch.optim.lr_scheduler.StepLR(o, 1000)",
            )
        ):
            yield fault

    @property
    def compute_precision(self) -> Precision:
        """The type that forwards compute in."""
        return Precision(self.precision)

    @property
    def text(self) -> str:
        """Text of the settings, which all workers must have alike."""
        return (
            f"clip_norm {self.clip_norm}, accumulate {self.accumulate}, precision "
            f"{self.precision}, ema_decay {self.ema_decay}"
        )

    def make_optimizer(self, parameters: Parameters) -> torch.optim.Optimizer:
        """Make the optimizer of some parameters.

        Raises:
            ConfigError: it cannot be stepped here.
        """
        optimizer: object = self.optimizer(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                "optimizer must return a torch.optim.Optimizer; it returned "
                f"{type(optimizer).__name__}"
            )
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            raise ConfigError(
                "the function that makes the optimizer makes a learning-rate schedule, "
                "too: optimizers are made several times; give scheduler=lambda "
                "optimizer: ..., which is stepped with it"
            )
        needed = _needed_to_step(optimizer)
        if needed:
            raise ConfigError(
                f"{type(optimizer).__name__} computes the loss several times per step "
                f"(its step() needs {needed}), a pipeline computes it once: take an "
                "optimizer whose step() needs no closure"
            )
        if has_modes(optimizer):
            optimizer.train()  # type: ignore[attr-defined]
        return optimizer

    def make_stage_optimizer(
        self, parameters: Parameters, whole: Parameters
    ) -> torch.optim.Optimizer:
        """Make the optimizer of a stage; it may leave out all of its parameters.

        One that leaves some out, or has groups, may choose by their place: it is made
        for the whole net, and keeps those of the stage.

        Args:
            parameters: the stage's.
            whole: those of its net, in the net's order.

        Raises:
            ConfigError: it has a tensor that is no parameter of the net.
        """
        own, made = {id(p) for p in parameters}, None
        with suppress(ValueError):  # for no parameters at all; or raised again
            made = self.make_optimizer(parameters)
        if made and len(made.param_groups) == 1 and members(made) == own:
            return made
        made = self.make_optimizer(whole)
        if others := members(made) - {id(p) for p in whole}:
            raise ConfigError(
                f"optimizer= takes {len(others)} tensors that are no parameters of the "
                "model or the loss: they would not be reduced, clipped and saved. Make "
                "them parameters of a module, and take those of the given list"
            )
        for group in made.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in own]
        for p in [p for p in made.state if id(p) not in own]:
            del made.state[p]
        return made

    def state_bytes(self, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the bytes of the optimizer's state for each of some parameters."""
        is_wide = self.compute_precision.has_masters
        kept = {  # by updates
            name: torch.empty_like(x, dtype=torch.float32, device="meta")
            if is_wide and x.dtype is torch.bfloat16
            else x
            for name, x in parameters.items()
        }
        own = {n: (x is not parameters[n]) * x.nbytes for n, x in kept.items()}
        with suppress(ValueError):  # they are chosen by identity: copies are others
            for name, size in optimizer_bytes(
                kept, lambda named: self.make_optimizer(Parameters(named))
            ).items():
                own[name] += size
        return own

    def make_scheduler(
        self, optimizer: torch.optim.Optimizer
    ) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Make an optimizer's learning-rate schedule, if there is one.

        Raises:
            ConfigError: it cannot be stepped here.
        """
        if self.scheduler is None:
            return None
        for group in optimizer.param_groups:
            # It changes a tensor in place, which another stage's optimizer may have.
            group.update({k: x.clone() for k, x in group.items() if torch.is_tensor(x)})
        scheduler = self.scheduler(optimizer)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigError(_NO_PLATEAU)
        return scheduler


_NO_PLATEAU: Final = (
    "ReduceLROnPlateau steps with a metric, scheduler= steps without one, after each "
    "update. Let a LambdaLR read a number that you change after evaluating (every "
    "worker gets the same metrics): scheduler=lambda o: LambdaLR(o, lambda step: "
    "share[0])"
)


def members(optimizer: torch.optim.Optimizer | None) -> set[int]:
    """Return the identities of an optimizer's parameters."""
    groups = () if optimizer is None else optimizer.param_groups
    return {id(p) for group in groups for p in group["params"]}


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it has weights to train and others to evaluate (schedule-free)."""
    return all(callable(getattr(optimizer, x, None)) for x in ("train", "eval"))


def _needed_to_step(optimizer: torch.optim.Optimizer) -> str:
    """Return the required arguments of an optimizer's step()."""
    needed = [
        name
        for name, parameter in inspect.signature(optimizer.step).parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if not needed and isinstance(optimizer, torch.optim.LBFGS):
        needed = ["closure"]  # its line search evaluates the loss
    return ", ".join(needed)
