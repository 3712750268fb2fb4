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
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn

from hocket.core.costs import Costs
from hocket.core.formats.costs_json import from_json, to_json
from hocket.errors import HocketError
from hocket.model.profile.profile import Profile, key_of, write_whole
from hocket.run.cluster.world import World
from hocket.run.engine.plan import short_hash

log = logging.getLogger(__name__)

_DEPTH: Final = 6  # counts every level: a function, its code, its constants, ...
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


def read_kept(path: Path, read: Callable[[Path], Any]) -> Any:
    """Read a file that was kept; None if there is none, or it cannot be read.

    Args:
        path: the file.
        read: reads it; raises HocketError if it is torn or of another kind.
    """
    try:
        return read(path) if path.exists() else None
    except (HocketError, OSError, UnicodeDecodeError) as error:
        log.warning("%s: it is measured again", error)
        return None


def keep(write: Callable[[], object]) -> None:
    """Write a file; log it if that fails, since nothing else depends on it."""
    try:
        write()
    except (OSError, ValueError) as error:  # JSON has no infinity
        log.warning("%s: the next start measures again", error)


def kept_costs(
    folder: str | Path | None,
    profile: Profile,
    depends_on: Mapping[str, str],
    world: World,
    measure: Callable[[], Costs],
) -> Costs:
    """Return the costs that rank 0 kept, or measure them. Every worker must call this.

    Args:
        folder: the folder of kept files; None always measures.
        profile: what the costs rest on, with its conditions.
        depends_on: all else that they depend on.
        world: all workers.
        measure: measures on all workers, and returns the same on each.
    """
    if folder is None or profile.slowness:  # devices of several kinds: not kept
        return measure()
    document = json.dumps(profile.to_json(), sort_keys=True)
    conditions = {**depends_on, "profile": short_hash(document)}
    path = Path(folder) / f"costs-{key_of(conditions)}.json"
    text = read_kept(path, _costs_text) if world.rank == 0 else None
    text = world.broadcast_json(text, name="costs found")
    if text is not None:
        return from_json(str(text), path=str(path))
    costs = measure()
    if world.rank == 0:
        keep(lambda: write_whole(path, to_json(costs)))
    return costs


def _costs_text(path: Path) -> str:
    """Return the text of a file of costs.

    Raises:
        ParseError: it holds none.
    """
    text = path.read_text(encoding="utf-8")
    from_json(text, path=str(path))
    return text


def code_text(value: object, depth: int = _DEPTH) -> str:
    """Return text that changes when a function's code or its arguments do.

    It is the same in every process. For a callable object only `__call__`'s code
    counts, not its attributes. Globals count by name only: neither their values nor the
    code of functions that are called.

    Args:
        value: a function, a module, or what they are made of.
        depth: how many levels to look into.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if not depth:
        return str(name)
    texts = [code_text(part, depth - 1) for part in _parts(value)]
    if isinstance(value, frozenset | set):
        texts.sort()
    return f"{name}({', '.join(texts)})"


_PARTS: Final[Mapping[type, tuple[str, ...]]] = {
    partial: ("func", "args", "keywords"),
    MethodType: ("__func__", "__self__"),
    FunctionType: ("__code__", "__defaults__", "__kwdefaults__", "__closure__"),
    CodeType: ("co_code", "co_names", "co_consts"),
    Tensor: ("shape", "dtype"),
}


def _parts(value: Any) -> Iterable[Any]:
    """Return what an object is made of, as far as its code goes."""
    if isinstance(value, tuple | list | frozenset | set):
        return value
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, nn.Module):
        own = (x for part in value.modules() for x in vars(part).items())
        plain = sorted(f"{name}={x!r}" for name, x in own if isinstance(x, _PLAIN))
        return repr(value), type(value).forward, plain
    if isinstance(value, CellType):
        try:
            return [value.cell_contents]
        except ValueError:  # its variable is not set yet
            return []
    names = next((x for kind, x in _PARTS.items() if isinstance(value, kind)), ())
    if is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in fields(value))
    if names:
        return [getattr(value, name) for name in names]
    kinds = (vars(kind) for kind in type(value).__mro__)
    return [next((own["__call__"] for own in kinds if "__call__" in own), None)]
