"""How workers of tests join their job, and what they return of an error."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from hocket import env
from hocket.errors import HocketError
from hocket.run.cluster.world import World, join_world

Reported = list[str]  # the error's type and its message; nothing if there was none


def join(attempt: int | None = None) -> World:
    """Join the job, with one thread; or begin it again, as this attempt."""
    torch.set_num_threads(1)
    if attempt is not None:
        os.environ[env.ATTEMPT.name] = str(attempt)
    return join_world()


def reported(action: Callable[[], object], *kinds: type[Exception]) -> Reported:
    """Return the kind and the message of the error that an action raises.

    Args:
        action: the call.
        kinds: the errors to report; hocket's, when none is given.
    """
    caught = kinds or (HocketError,)
    try:
        action()
    except caught as error:
        return [type(error).__name__, str(error)]
    return []


def said(action: Callable[[], object], *kinds: type[Exception]) -> str:
    """Return the same as one text, `Kind: message`; empty if nothing was raised."""
    return ": ".join(reported(action, *kinds))
