"""Pauses Python's garbage collector where all that is made stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Let Python collect no garbage while the block runs.

    With torch there are a million objects, and a look at all of them takes a tenth of a
    second. Importing its exporter, and exporting, would cause several.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
