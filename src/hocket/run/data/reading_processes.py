"""The processes of torch's DataLoader, which stay while a worker ends after a SIGTERM.

torchrun ──SIGTERM──▶ worker            ends after the step under way, and saves
└──▶ its processes     would die, and the DataLoader's error with
them reach the worker wherever it is
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from hocket.run.cluster.start import end_with_parent


def begun(loader: Iterable[Any]) -> Iterator[Any]:
    """Begin to read a loader; its processes, if it has some, end with this one only."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return iter(loader)
    own = loader.worker_init_fn
    loader.worker_init_fn = partial(stay, own=own)
    try:
        return iter(loader)
    finally:
        loader.worker_init_fn = own


def end_and_stay(number: int) -> None:
    """End a process that reads when its parent is killed; torch's would read on."""
    end_with_parent()
    stay(number)


def stay(number: int, own: Callable[[int], None] | None = None) -> None:
    """Let a SIGTERM end a process that reads only if its parent has sent it.

    torchrun sends one to a worker's whole process group, and the worker may still need
    batches for the step after which it saves.

    Args:
        number: the process's.
        own: called with it behind this, the loader's own function.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_parent_asks, daemon=True).start()
    if own is not None:
        own(number)


def _end_when_parent_asks() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
