"""Settings of torch that all jobs of a process share, and a job must not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch

from hocket.errors import ConfigError

Settings: TypeAlias = tuple[Any, ...]

# Each setting's name, how to read it, and how to set it.
_SETTINGS: Final[tuple[tuple[str, Callable[[], Any], Callable[[Any], Any]], ...]] = (
    ("torch.set_default_dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("torch.set_num_threads", torch.get_num_threads, torch.set_num_threads),
    (
        "torch.use_deterministic_algorithms",
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    (
        "torch.set_float32_matmul_precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    (
        "torch.backends.cudnn.benchmark",
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
    ),
    (
        "torch.backends.cudnn.deterministic",
        lambda: torch.backends.cudnn.deterministic,
        lambda value: setattr(torch.backends.cudnn, "deterministic", value),
    ),
)


def read_settings() -> Settings:
    """Return the values of all settings."""
    return tuple(read() for _, read, _ in _SETTINGS)


def set_settings(values: Settings) -> None:
    """Set all settings, as `read_settings` has returned them."""
    for (_, read, put), value in zip(_SETTINGS, values, strict=True):
        if read() != value:  # to put one may import what takes seconds
            put(value)


def check_settings(job: str, before: Settings) -> None:
    """Refuse that a job has changed a setting of all jobs; the old value comes back.

    Raises:
        ConfigError: it has.
    """
    for (name, read, put), old in zip(_SETTINGS, before, strict=True):
        new = read()
        if new != old:
            put(old)
            raise ConfigError(
                f"job {job!r} changed {name} from {old} to {new}, which acts on all "
                "jobs; set it before hocket.share, for all of them"
            )
