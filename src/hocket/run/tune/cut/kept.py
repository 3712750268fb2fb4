"""Keeps what is measured before the first step, so that the next start reuses it.

    profile-<key>.json   each layer's seconds and bytes          conditions
    costs-<key>.json     the stages' costs, with messages and    the profile, stages,
                         updates                                 optimizer, workers
    costs-<key>.json     the same costs, corrected by a dry      those costs, this order
                         run of this order

A key is a digest of all that the numbers depend on, so a file of other conditions is
not found. Rank 0 reads, and broadcasts what it found: all workers reuse, or all
measure. What cannot be read is measured again, and what cannot be written is not kept.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from hocket.core.costs import Costs
from hocket.core.formats.costs_json import from_json, to_json
from hocket.errors import HocketError
from hocket.model.guards.code_text import code_text
from hocket.model.profile.profile import Profile, key_of, noise_of, write_whole
from hocket.run.cluster.world import World
from hocket.run.engine.plan import short_hash
from hocket.run.tune.profile_workers import watched

log = logging.getLogger(__name__)

Kept = TypeVar("Kept")


def code_digest(code: Iterable[object]) -> str:
    """Return a digest of functions and modules, and of all that they reach.

    Returns:
        Empty if not all of it is known: then nothing that depends on it may be kept.
    """
    try:
        return short_hash(code_text(*code))
    except Exception as error:  # the user's objects may raise anything
        log.info("every start measures again, as code cannot be compared: %s", error)
        return ""


def kept_or_measured(
    path: Path | None,
    what: str,
    world: World,
    read: Callable[[str, str], Kept],
    text_of: Callable[[Kept], str],
    measure: Callable[[], Kept],
) -> Kept:
    """Return what rank 0 kept, or measure it and keep it. Every worker must call this.

    Args:
        path: the file; None on rank 0 always measures.
        what: a word for it.
        world: all workers.
        read: reads a text, and names its second argument in errors; raises HocketError
            if it is torn or of another kind.
        text_of: writes a text; raises ValueError if it may not be kept.
        measure: measures on all workers, and returns the same on each.
    """
    text = _kept_text(path, read) if path is not None and world.rank == 0 else None
    text = world.broadcast_json(text, name=f"{what} found")
    if text is not None:
        return read(str(text), f"{what} of rank 0")
    found = measure()
    if path is not None and world.rank == 0:
        try:
            write_whole(path, text_of(found))
        except (OSError, ValueError) as error:  # JSON has no infinity
            log.warning("%s: the next start measures again", error)
    return found


def _kept_text(path: Path, read: Callable[[str, str], object]) -> str | None:
    """Return the text of a file; None if there is none, or it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else None
        if text is not None:
            read(text, str(path))
    except (HocketError, OSError, UnicodeDecodeError) as error:
        log.warning("%s: it is measured again", error)
        return None
    return text


def kept_costs(
    folder: str | Path | None,
    profile: Profile,
    code: tuple[object, ...],
    depends_on: Mapping[str, str],
    world: World,
    measure: Callable[[], Costs],
) -> Costs:
    """Return the costs that rank 0 kept, or measure them. Every worker must call this.

    Args:
        folder: rank 0's folder of kept files; None always measures.
        profile: what the costs rest on.
        code: the functions and modules of the user's that they depend on.
        depends_on: all else that they depend on.
        world: all workers.
        measure: measures on all workers, and returns the same on each.
    """
    if profile.slowness:  # devices of several kinds: not kept
        return measure()
    document = json.dumps(profile.to_json(), sort_keys=True)
    written = "" if folder is None or world.rank or profile.noise else code_digest(code)
    conditions = {**depends_on, "profile": short_hash(document), "code": written}
    name = f"costs-{key_of(conditions)}.json"
    path = Path(folder) / name if folder and written else None
    return kept_or_measured(
        path, "costs", world, _read_costs, _steady, partial(watched, measure, world)
    )[0]


def _read_costs(text: str, path: str) -> tuple[Costs, float]:
    return from_json(text, path=path), 0.0


def _steady(measured: tuple[Costs, float]) -> str:
    costs, core_wait = measured
    if noise := noise_of(core_wait, "messages and updates were"):
        raise ValueError(noise)
    return to_json(costs)
