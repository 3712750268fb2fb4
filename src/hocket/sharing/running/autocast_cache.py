"""Refuses autocast's cache of weights where several jobs run at the same time.

    job a   autocast: cast w ──────── use w ── cast w again ── use w
    job b       autocast ─── leaves: the cache is empty

torch has one cache of casts for all threads, and empties it when one of them leaves its
last block. A weight that is used twice is then cast twice, and its gradient is added up
in another order than alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from hocket.errors import ConfigError
from hocket.sharing.running.job_threads import shared_job
from hocket.sharing.running.random_state import THREAD
from hocket.sharing.running.replaced import replaced


def _enter_without_cache(enter: Callable[..., Any]) -> Callable[..., Any]:
    def enter_without_cache(block: Any) -> Any:
        found = enter(block)
        job, draws = shared_job(), THREAD.draws
        if job is None or draws is None or not torch.is_autocast_cache_enabled():
            return found
        if not torch.is_autocast_enabled(block.device):
            return found
        block.__exit__(None, None, None)
        error = ConfigError(
            f"{draws.subject.format(job)} entered torch.autocast with its cache of "
            "weights, which is one for all threads: where other jobs empty it, "
            "gradients differ from those alone; give autocast cache_enabled=False, or "
            f"use {draws.ways_out}"
        )
        draws.refused(error)
        raise error

    return enter_without_cache


def blocks_checked() -> AbstractContextManager[None]:
    """Replace `torch.autocast.__enter__` in the block, to see which job calls it."""
    return replaced(torch.autocast, "__enter__", _enter_without_cache)
