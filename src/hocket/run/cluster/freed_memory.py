"""Keeps the memory that ops free for the ops that follow, if malloc is glibc's.

What an op frees, the next one allocates again. By itself glibc gives freed memory at
the end of its heap back to the system, and takes it again, page by page, a fault each:

                     glibc alone                         here
    0F0  2 MiB       512 pages from the system           512 pages, the first time
         freed       to the system                       to the heap
    0F1  2 MiB       512 pages from the system           no page

How much of that happens depends on what a process freed before: a large piece raises
glibc's own limits. A ResNet's step took up to 10,000 faults, and a tenth more time.
What is kept is what was in use at once: the peak of resident memory grew by 0 to 4 %
(docs/decisions/0006).

The setting is process-wide, and the earlier value cannot be read: it stays until the
process ends. Pieces above 32 MiB, the most that glibc accepts, still come from the
system and go back.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Final

from hocket import env

log = logging.getLogger(__name__)

# From malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3

_NEVER: Final = -1
_MOST_BYTES: Final = 32 << 20  # HEAP_MAX_SIZE / 2; mallopt refuses more


def keep_freed_memory() -> bool:
    """Let malloc keep freed memory from now on; return whether it does.

    Nothing is changed where another C library is in use, where HOCKET_KEEP_FREED_MEMORY
    says so, or where the user has set malloc up in the environment.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not env.KEEP_FREED_MEMORY.switch():
        return False
    own = [variable.name for variable in env.MALLOC if variable.is_set]
    if own:
        log.debug("malloc stays as %s set it up", ", ".join(own))
        return False
    # Either one also stops glibc from moving both thresholds by itself.
    kept = libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _MOST_BYTES) and kept)


def trim_heap() -> None:
    """Return unused heap pages to the system; takes milliseconds."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
