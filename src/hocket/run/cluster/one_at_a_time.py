"""A backend of gloo that runs collectives strictly in the order of their posts.

torch's own gives two threads to each group, so that two reductions share the network
and the first to begin ends late. Where a forward waits for it, that time is lost.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import torch.distributed as dist

from hocket import env

BACKEND: Final = "gloo_in_order"
_DEVICES: Final = ["cpu", "cuda"]


def in_order_backend() -> str:
    """Return the backend's name; torch knows it from the first call on."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _one_thread, devices=_DEVICES)
    return BACKEND


def _one_thread(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in its stub
    options._threads = 1
    options._timeout = timeout
    interface = env.GLOO_INTERFACE.text()
    options._devices = [
        dist.ProcessGroupGloo.create_device(interface=interface)
        if interface
        else dist.ProcessGroupGloo.create_default_device()
    ]
    return dist.ProcessGroupGloo(store, rank, size, options)
