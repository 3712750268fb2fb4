"""Refuses what waves cannot do."""

from __future__ import annotations

from typing import get_args

from hocket.errors import ConfigError
from hocket.run.stage.precision import Precision
from hocket.sharing.waves.order import NUM_WAVES, SyncName


def checked_microbatches(sync: str, num_microbatches: int | None) -> int:
    """Return the number of microbatches.

    Raises:
        ConfigError: `sync` is unknown, or the number is not possible with it.
    """
    if sync not in get_args(SyncName):
        raise ConfigError(f"sync={sync!r}: it may be {', '.join(get_args(SyncName))}")
    if num_microbatches is None:
        return NUM_WAVES if sync == "exact" else 1
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches is {num_microbatches}: at least 1")
    if sync == "exact" and num_microbatches % NUM_WAVES:
        raise ConfigError(
            f"num_microbatches is {num_microbatches}, and with sync='exact' the two "
            f"waves take turns: use an even number, such as {num_microbatches + 1}, or "
            "sync='wave', whose batches go whole to one wave"
        )
    return num_microbatches


def refuse_scale(sync: str, precision: Precision) -> None:
    """Refuse a loss scale that is judged too late.

    Raises:
        ConfigError: sync is "wave", and forwards compute in float16.
    """
    if sync == "wave" and precision is Precision.FLOAT16:
        raise ConfigError(
            'precision="float16" with sync="wave": an update reads the gradients of '
            "two batches. Whether the newer one has overflowed its loss scale is known "
            "when the next batch has begun with that scale, and its update reads the "
            'same gradients again: take precision="bfloat16", which needs no scale, or '
            "sync='exact', whose updates end each batch"
        )
