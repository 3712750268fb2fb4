"""Makes a recipe's freezing policy, its shapes and its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hocket.core.layout import WorkerLayout
from hocket.freeze import Alpha, ArgminGradient, Listed, Percentile, Plasticity
from hocket.freeze.cache.settings import Cache
from hocket.freeze.policy import Policy
from hocket.recipes.config.freeze_settings import (
    AlphaSettings,
    AnyFreezing,
    ArgminGradientSettings,
    CacheSettings,
    FreezeSettings,
    ListedSettings,
    PercentileSettings,
    PlasticitySettings,
)
from hocket.recipes.run_files import CACHE_NAME


def freezing_options(
    freezing: AnyFreezing | None,
    cache: CacheSettings | None,
    steps_per_epoch: int,
    run_dir: Path,
) -> dict[str, Any]:
    """Return the arguments of `hocket.Pipeline` that say what freezes; none if nothing.

    Args:
        freezing: the recipe's section [freeze].
        cache: the recipe's section [cache].
        steps_per_epoch: the steps between decisions where the recipe does not say.
        run_dir: the run's folder, for a cache without one.
    """
    if not isinstance(freezing, FreezeSettings):
        return {}
    return {
        "freeze": _policy(freezing, steps_per_epoch),
        "shapes": _shapes(freezing),
        "balance": freezing.balance,
        "recut": freezing.recut,
        "cache": None if cache is None else _cache(cache, run_dir),
    }


def _policy(settings: FreezeSettings, steps_per_epoch: int) -> Policy[Any]:
    when: dict[str, Any] = {
        "every_steps": settings.every_steps or steps_per_epoch,
        "layers": settings.layers,
    }
    match settings:
        case AlphaSettings(alpha=alpha):
            return Alpha(alpha, **when)
        case ArgminGradientSettings(alpha=alpha, patience=patience):
            return ArgminGradient(alpha, patience, **when)
        case PercentileSettings(percentile=percentile, patience=patience):
            return Percentile(percentile=percentile, patience=patience, **when)
        case PlasticitySettings(
            window=window, tolerance=tolerance, patience=patience, unfreeze_at=share
        ):
            return Plasticity(
                window=window,
                tolerance=tolerance,
                patience=patience,
                unfreeze_at=share or None,
                **when,
            )
        case ListedSettings(num_frozen=listed):
            return Listed({int(key): number for key, number in listed.items()}, **when)
        case _:
            raise AssertionError(f"{type(settings).__name__} is no policy")


def _shapes(settings: FreezeSettings) -> dict[int, tuple[int, int]] | None:
    if settings.shapes is None:
        return None
    layouts = {int(key): WorkerLayout.parse(x) for key, x in settings.shapes.items()}
    return {key: (x.num_devices, x.num_replicas) for key, x in layouts.items()}


def _cache(settings: CacheSettings, run_dir: Path) -> Cache:
    return Cache(
        run_dir / CACHE_NAME if settings.folder is None else Path(settings.folder),
        ram_bytes=settings.ram_bytes,
        disk_bytes=settings.disk_bytes,
        dtype=settings.dtype,
        draws_once=settings.draws_once,
    )
