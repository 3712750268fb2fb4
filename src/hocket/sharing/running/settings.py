"""Settings of torch that all jobs of a process share, and a job must not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, TypeAlias

import torch
from torch.backends import cuda, cudnn

Settings: TypeAlias = tuple[Any, ...]

_MIXED: Final = "set by fp32_precision"  # torch refuses to read it then


@dataclass(frozen=True, slots=True)
class _Setting:
    """One setting.

    Args:
        name: what a job's code calls or sets.
        read: reads it.
        put: sets it.
    """

    name: str
    read: Callable[[], Any]
    put: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that has changed.

    Args:
        name: what a job's code calls or sets.
        old: the value before.
        new: the value after.
    """

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        """Return it as text."""
        return f"{self.name} from {self.old} to {self.new}"


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return _MIXED


def _cudnn_tf32() -> bool | str:
    try:
        return cudnn.allow_tf32
    except RuntimeError:
        return _MIXED


def _attribute(path: str) -> _Setting:
    *parents, name = path.split(".")
    home = reduce(getattr, parents, torch)
    return _Setting(
        f"torch.{path}",
        lambda: getattr(home, name),
        lambda value: setattr(home, name, value),
    )


# A switch comes before the finer ones that it sets, too.
_SETTINGS: Final = (
    _Setting(
        "torch.set_default_dtype", torch.get_default_dtype, torch.set_default_dtype
    ),
    _Setting("torch.set_num_threads", torch.get_num_threads, torch.set_num_threads),
    _Setting(
        "torch.use_deterministic_algorithms",
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    _attribute("backends.fp32_precision"),
    _Setting(
        "torch.set_float32_matmul_precision",
        _matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    _Setting(
        "torch.autograd.set_detect_anomaly",
        torch.is_anomaly_enabled,
        torch.autograd.set_detect_anomaly,
    ),
    _Setting(
        "torch.backends.cudnn.allow_tf32",
        _cudnn_tf32,
        lambda value: setattr(cudnn, "allow_tf32", value),
    ),
    _attribute("backends.cudnn.enabled"),
    _attribute("backends.cudnn.benchmark"),
    _attribute("backends.cudnn.deterministic"),
    _attribute("backends.cudnn.conv.fp32_precision"),
    _attribute("backends.cuda.matmul.fp32_precision"),
    _attribute("backends.cuda.matmul.allow_fp16_reduced_precision_reduction"),
    _attribute("backends.cuda.matmul.allow_bf16_reduced_precision_reduction"),
    _attribute("backends.cuda.matmul.allow_fp16_accumulation"),
    _attribute("backends.mkldnn.enabled"),
    _attribute("backends.mkldnn.matmul.fp32_precision"),
    _Setting(
        "torch.backends.cuda.enable_flash_sdp",
        cuda.flash_sdp_enabled,
        cuda.enable_flash_sdp,
    ),
    _Setting(
        "torch.backends.cuda.enable_mem_efficient_sdp",
        cuda.mem_efficient_sdp_enabled,
        cuda.enable_mem_efficient_sdp,
    ),
    _Setting(
        "torch.backends.cuda.enable_math_sdp",
        cuda.math_sdp_enabled,
        cuda.enable_math_sdp,
    ),
    _Setting(
        "torch.backends.cuda.enable_cudnn_sdp",
        cuda.cudnn_sdp_enabled,
        cuda.enable_cudnn_sdp,
    ),
)


def read_settings() -> Settings:
    """Return the values of all settings."""
    return tuple(setting.read() for setting in _SETTINGS)


def set_settings(values: Settings) -> tuple[Change, ...]:
    """Set all settings, as `read_settings` has returned them; return what changes."""
    now = read_settings()
    if now == values:  # after nearly each iteration
        return ()
    for setting, value in zip(_SETTINGS, values, strict=True):
        # To put one may import what takes seconds, or set another one.
        if value != _MIXED and setting.read() != value:
            setting.put(value)
    return tuple(
        Change(setting.name, old, new)
        for setting, old, new in zip(_SETTINGS, values, now, strict=True)
        if old != new
    )
