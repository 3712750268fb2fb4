"""Refuses arguments and outputs that a loss cannot use, and names their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hocket.errors import ConfigError, ModelError


def require_positive(owner: str, **numbers: float) -> None:
    """Refuse numbers that are not positive.

    Args:
        owner: the name of the loss, for the error.
        numbers: the numbers by the names of their arguments.

    Raises:
        ConfigError: one of them is 0, negative or not a number.
    """
    for name, number in numbers.items():
        if not number > 0:
            raise ConfigError(f"{owner}({name}={number}): {name} must be above 0")


def require_weights(owner: str, **weights: float) -> None:
    """Refuse negative weights, and weights that are all 0.

    Raises:
        ConfigError: a weight is negative, or none is above 0.
    """
    given = ", ".join(f"{name}={weight}" for name, weight in weights.items())
    if not all(weight >= 0 for weight in weights.values()) or not any(weights.values()):
        raise ConfigError(
            f"{owner}({given}): weights must be 0 or more, and one of them above 0"
        )


def teacher_of(teachers: Mapping[str, Any], name: str, owner: str) -> Any:
    """Return the outputs of the teacher that a loss reads.

    Raises:
        ConfigError: there is no teacher of this name.
    """
    if name not in teachers:
        raise ConfigError(
            f"{owner} reads the outputs of teacher {name!r}, and the teachers are "
            f"{', '.join(map(repr, teachers)) or 'none'}: give "
            f"{owner}(teacher=...) the name that teachers={{...}} has"
        )
    return teachers[name]


def widened(tensor: Tensor) -> Tensor:
    """Convert half-precision numbers to float32; return others as they are."""
    return tensor if tensor.dtype.itemsize >= torch.float32.itemsize else tensor.float()


def require_tensor(value: Any, whose: str, way_out: str) -> Tensor:
    """Return what must be one tensor.

    Args:
        value: the value.
        whose: whose output it is, for the error.
        way_out: what to do where it is none.

    Raises:
        ModelError: it is no tensor.
    """
    if not isinstance(value, Tensor):
        raise ModelError(f"{whose} is a {type(value).__name__}: {way_out}")
    return value


def require_same_shape(
    student: Tensor, teacher: Tensor, name: str, what: str, way_out: str
) -> None:
    """Refuse outputs of student and teacher that differ in shape.

    Args:
        student: the student's output.
        teacher: the teacher's output of the same samples.
        name: the teacher's name.
        what: what both are, such as "logits".
        way_out: how to make them equal.

    Raises:
        ModelError: they differ; names both shapes.
    """
    if student.shape != teacher.shape:
        raise ModelError(
            f"the student's {what} are {tuple(student.shape)}, those of teacher "
            f"{name!r} are {tuple(teacher.shape)}: {way_out}"
        )


def require_labels(labels: Any, logits: Tensor) -> Tensor:
    """Return targets that hold one class for each row of logits.

    Raises:
        ModelError: they are no tensor, or have another shape.
    """
    wanted = tuple(logits.shape[:-1])
    if not isinstance(labels, Tensor) or labels.shape != wanted:
        is_tensor = isinstance(labels, Tensor)
        found = tuple(labels.shape) if is_tensor else f"a {type(labels).__name__}"
        raise ModelError(
            f"the student's logits are {tuple(logits.shape)}, and the targets {found}: "
            f"give one class for each, a tensor of shape {wanted}"
        )
    return labels
