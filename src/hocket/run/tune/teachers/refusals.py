"""Refuses what teachers do not go with, and warns of what they change."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Final

from hocket.core.schedule import Schedule
from hocket.errors import ConfigError
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.teachers.teacher import Teacher
from hocket.run.weights.momentum import Momentum

_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
_LOW: Final = 0.9  # a momentum below it makes a delay of 1 felt


class LowMomentumWarning(UserWarning):
    """A delayed teacher moves so fast that its delay changes the training."""


def refuse_unfillable(config: PipelineConfig, student: Schedule) -> None:
    """Refuse orders that cannot be filled, and settings that need another order.

    Args:
        config: a configuration with teachers.
        student: the student's order.

    Raises:
        ConfigError: says the way out.
    """
    if student.body or any(stage.delay for stage in student.program.stages):
        raise ConfigError(
            f"the steps of schedule {config.schedule!s:.40} overlap, and a teacher's "
            "forwards fill the waits of an order that ends each step before the next "
            'begins: take one such as "1f1b", "gpipe" or "zb-h1"'
        )
    (net,) = student.program.nets
    for name, teacher in config.teachers.items():
        _check_counts(config, name, teacher)
        if name == net.name or not _NAME.fullmatch(name):
            raise ConfigError(
                f"a teacher is named {name!r}: use letters, digits, _ and -, and not "
                f"{net.name!r}, which is the student's net in the schedule"
            )


def _check_counts(config: PipelineConfig, name: str, teacher: Teacher) -> None:
    own = config.num_microbatches
    asked = teacher.num_microbatches or own
    reads_batch = teacher.whole_batch or config.whole_batch
    if max(own, asked) % min(own, asked) and not reads_batch:
        raise ConfigError(
            f"teacher {name!r} has {asked} microbatches, and the student {own}: take a "
            "multiple, or a number that divides it; or whole_batch=True, where the "
            "loss reads the outputs of all samples"
        )


def warn_of_low_momentum(teachers: Mapping[str, Teacher]) -> None:
    """Warn where a delay is not small beside the age of the averaged weights.

    The delayed teacher is behind the present one by `1 - m` of the distance between the
    student and the teacher before the update.

    Args:
        teachers: by name.
    """
    for name, teacher in teachers.items():
        if not teacher.delay or not isinstance(teacher.update, Momentum):
            continue
        m = teacher.update.at(0)
        if m < _LOW:
            warnings.warn(
                f"teacher {name!r} has delay {teacher.delay} and a momentum of {m:g}: "
                f"each update moves it by {1 - m:.0%} of its distance to the student, "
                "and so much is a forward behind for each update of delay. The mean "
                f"age of what it averages is {m / (1 - m):.1f} updates, to which the "
                f"delay adds {teacher.delay} (at 0.996: 249). Take delay=0, or a "
                "larger momentum",
                LowMomentumWarning,
                stacklevel=2,
            )
