"""Checks a metrics function and what it returns: named means over samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hocket.errors import ModelError

Metrics = Callable[[Any, Any], Mapping[str, Tensor]]


def check_metrics(metrics: object) -> None:
    """Raise ModelError unless the metrics can be called.

    Raises:
        ModelError: it is no function.
    """
    if metrics is not None and not callable(metrics):
        raise ModelError(
            "metrics must be one function, metrics(output, targets), which returns a "
            f"dict of named means over samples; got a {type(metrics).__name__}"
        )


def named_means(value: object) -> dict[str, Tensor]:
    """Return a metrics function's result as scalars in float64.

    Args:
        value: a mapping from names to numbers, or to tensors of one element.

    Raises:
        ModelError: it is anything else.
    """
    if not isinstance(value, Mapping):
        raise ModelError(
            "metrics(output, targets) must return a dict of named means over the "
            "microbatch's samples, such as {'accuracy': correct.double().mean()}; got "
            f"a {type(value).__name__}"
        )
    return {str(name): _mean(str(name), x) for name, x in value.items()}


def _mean(name: str, value: Any) -> Tensor:
    try:
        mean = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        mean = None
    if mean is None or mean.numel() != 1:
        found = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            found = f"a tensor of shape {tuple(value.shape)}"
        raise ModelError(
            f"the metric {name!r} must be one number, the mean over the microbatch's "
            f"samples; got {found}"
        )
    return mean.reshape(())
