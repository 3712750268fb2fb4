"""Runs a captured inner graph under the mode that the model's code set for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def with_grad_mode(enabled: bool, inner: Callable[..., Any], *args: Any) -> Any:
    """Run a part of the model under `torch.no_grad()` or `enable_grad()`."""
    with torch.set_grad_enabled(enabled):
        return inner(*args)


def with_autocast(
    device_type: str,
    dtype: torch.dtype | None,
    enabled: bool,
    cache_enabled: bool | None,
    inner: Callable[..., Any],
    *args: Any,
) -> Any:
    """Run a part of the model under `torch.autocast(...)`."""
    with torch.autocast(device_type, dtype, enabled, cache_enabled):
        return inner(*args)
