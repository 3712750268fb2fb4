"""The training settings of a pipeline's user, validated once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from torch import nn

from hocket.errors import ConfigError
from hocket.run.stage.precision import Precision
from hocket.run.weights.correction.correction import CorrectionName

PrecisionName = Literal["float32", "bfloat16", "float16"]


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


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """Optimizer, schedule, clipping, precision and the other training settings.

    Args:
        optimizer: called once per stage with its parameters.
        scheduler: called once with each optimizer; stepped after each update.
        clip_norm: the largest total norm of all gradients.
        accumulate: batches per update.
        precision: the type that forwards compute in.
        ema_decay: the decay of the averaged weights, if they are wanted.
        correction: the correction of stale gradients, on stages with a delay.
        num_discounted_updates: the updates over which a correction "lr-discount" fades;
            1000 when not given.

    Raises:
        ConfigError: a value is not valid; names all such values.
    """

    optimizer: OptimizerFactory
    scheduler: SchedulerFactory | None = None
    clip_norm: float | None = None
    accumulate: int = 1
    precision: Precision = Precision.FLOAT32
    ema_decay: float | None = None
    correction: CorrectionName = "none"
    num_discounted_updates: int | None = None

    def __post_init__(self) -> None:
        faults = "; ".join(self._faults())
        if faults:
            raise ConfigError(faults)

    def _faults(self) -> Iterator[str]:
        if self.clip_norm is not None and not self.clip_norm > 0.0:
            yield (
                f"clip_norm is {self.clip_norm}: it must be above 0 (leave it out, and "
                "no gradient is clipped)"
            )
        if self.accumulate < 1:
            yield f"accumulate is {self.accumulate}: each update takes 1 batch or more"
        if self.ema_decay is not None and not 0.0 <= self.ema_decay < 1.0:
            yield (
                f"ema_decay is {self.ema_decay}: it must be at least 0 and below 1, "
                "such as 0.999"
            )
        if self.correction not in get_args(CorrectionName):
            names = ", ".join(get_args(CorrectionName))
            yield f"correction is {self.correction!r}: it may be {names}"
        yield from self._discount_faults()

    def _discount_faults(self) -> Iterator[str]:
        number = self.num_discounted_updates
        if number is None:
            return
        if self.correction != "lr-discount":
            yield (
                f"num_discounted_updates {number} has no effect with correction "
                f"{self.correction!r}: it is for 'lr-discount'"
            )
        if number < 1:
            yield (
                f"num_discounted_updates is {number}: the discount fades over 1 update "
                "or more"
            )

    @property
    def text(self) -> str:
        """Text of the settings, which all workers must have alike."""
        return (
            f"clip_norm {self.clip_norm}, accumulate {self.accumulate}, precision "
            f"{self.precision.value}, ema_decay {self.ema_decay}, correction "
            f"{self.correction}, num_discounted_updates {self.num_discounted_updates}"
        )

    def make_optimizer(self, parameters: Parameters) -> torch.optim.Optimizer:
        """Make the optimizer of some parameters.

        Raises:
            ConfigError: it cannot be stepped here.
        """
        optimizer = self.optimizer(parameters)
        needed = _needed_to_step(optimizer)
        if needed:
            raise ConfigError(
                f"{type(optimizer).__name__} computes the loss several times per step "
                f"(its step() needs {needed}), a pipeline computes it once: take an "
                "optimizer whose step() needs no closure"
            )
        return optimizer

    def make_scheduler(
        self, optimizer: torch.optim.Optimizer
    ) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Make an optimizer's learning-rate schedule, if there is one.

        Raises:
            ConfigError: it cannot be stepped here.
        """
        if self.scheduler is None:
            return None
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


def precision_of(name: str) -> Precision:
    """Return the precision of a name.

    Raises:
        ConfigError: there is none; names those that there are.
    """
    try:
        return Precision(name)
    except ValueError:
        names = ", ".join(precision.value for precision in Precision)
        raise ConfigError(f"precision is {name!r}: it may be {names}") from None
