"""Loads a checkpoint on all workers together: the newest that all of them can read.

rank 0   the candidates, newest first
all      read ─▶ damage on any worker: the next candidate
              └▶ restored by all

Also opens what `weights=` names: safetensors, or a checkpoint of a pipeline's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from torch import Tensor, nn

from hocket.errors import CheckpointError, DamagedError
from hocket.model.weights.fresh import FreshWeights
from hocket.model.weights.given import GivenWeights
from hocket.model.weights.stored import StoredWeights, open_folder
from hocket.run.checkpoint.format.folder import LATEST, saved
from hocket.run.checkpoint.format.manifest import MANIFEST, Section
from hocket.run.checkpoint.format.newest import find, previous
from hocket.run.checkpoint.format.opened import (
    BY_NAME,
    OpenedCheckpoint,
    check_pointer,
    open_checkpoint,
    read_tensor,
)
from hocket.run.cluster.store.store_exchange import StoreExchange

log = logging.getLogger(__name__)

T = TypeVar("T")
_HINT: Final = (
    "; with allow_previous=True, the one saved before it would be loaded in its place"
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a load.

    Args:
        path: the checkpoint.
        step: the number of the next step.
        data: the user's data that was saved with it.
        num_filled: the samples that `fill` had done.
    """

    path: Path
    step: int
    data: Any
    num_filled: int = 0


@dataclass(frozen=True, slots=True)
class Candidates:
    """The checkpoints that may be loaded.

    Args:
        folder: the folder of checkpoints.
        step: the checkpoint's step; "latest" for the newest.
        allow_previous: if it is damaged, take the newest whole one before it.
    """

    folder: Path
    step: int | str
    allow_previous: bool

    def names(self) -> Sequence[str]:
        """Return the checkpoints to try, by name.

        Raises:
            CheckpointError: there is none.
        """
        first: Path | None = None
        try:
            first = find(self.folder, self.step)
            check_pointer(first)
        except DamagedError:
            if not self.allow_previous:
                raise
        paths = [] if first is None else [first]
        if self.allow_previous:
            paths += previous(self.folder, first)
        return [path.name for path in paths]


def first_readable(
    candidates: Candidates, exchange: StoreExchange, read: Callable[[Path], str | T]
) -> tuple[Path, T]:
    """Read the first candidate that all workers can read.

    Args:
        candidates: those of rank 0 count.
        exchange: exchanges values between the workers.
        read: returns what was read, or its damage, on all workers alike.

    Returns:
        Its path, and what was read.

    Raises:
        CheckpointError: there is none, it does not fit, or all are damaged.
    """
    find_here = candidates.names if exchange.rank == 0 else list
    [names, *_] = agreed(exchange, "candidates", find_here)
    faults: list[str] = []
    for name in names:
        path = candidates.folder / str(name)
        found = read(path)
        if not isinstance(found, str):
            return path, found
        faults.append(found)
        log.warning("%s", found)
    hint = "" if candidates.allow_previous else _HINT
    raise DamagedError(f"{'; '.join(faults)}. Nothing was loaded{hint}")


def read_together(exchange: StoreExchange, name: str, read: Callable[[], T]) -> str | T:
    """Read on every worker; return what was read, or the damage if any finds some.

    Raises:
        CheckpointError: it does not fit, on some worker.
    """
    found: list[T] = []

    def attempt() -> str:
        try:
            found.append(read())
        except DamagedError as error:
            return str(error)
        return ""

    damages = agreed(exchange, name, attempt)
    return next((str(x) for x in damages if x), None) or found[0]


def agreed(exchange: StoreExchange, name: str, act: Callable[[], Any]) -> list[Any]:
    """Call a function on every worker, and return all results.

    Raises:
        CheckpointError: the first worker's that failed; raised on all workers.
    """
    kind, value = "", None
    try:
        value = act()
    except DamagedError as error:
        kind, value = "damaged", str(error)
    except CheckpointError as error:
        kind, value = "error", str(error)
    results = exchange.gather(name, [kind, value])
    for kind, value in results:
        if kind:
            raise (DamagedError if kind == "damaged" else CheckpointError)(str(value))
    return [value for _, value in results]


def given_weights(
    model: nn.Module, weights: str | Path | FreshWeights | GivenWeights | None
) -> GivenWeights | None:
    """Open the weights that a pipeline is given, and prepare its model for them.

    Args:
        model: the model.
        weights: see `hocket.PipelineConfig`.

    Raises:
        ModelError: they are not there, or do not fit the model.
        CheckpointError: the checkpoint is damaged.
    """
    if weights is None or isinstance(weights, GivenWeights):
        return weights
    if isinstance(weights, FreshWeights):
        return GivenWeights(model, weights)
    path = Path(weights)
    if (path / MANIFEST).is_file():
        return GivenWeights(model, _of_checkpoint(open_checkpoint(path)))
    if path.is_dir() and saved(path):
        return GivenWeights(model, _of_checkpoint(open_checkpoint(find(path, LATEST))))
    return GivenWeights(model, open_folder(path))


def _of_checkpoint(opened: OpenedCheckpoint) -> StoredWeights:
    """Return a checkpoint's weights; each tensor is checked against its hash."""
    locations = opened.locations(Section.WEIGHTS)
    forms = {
        name: (str(BY_NAME[x.record.dtype]).removeprefix("torch."), x.record.shape)
        for name, x in locations.items()
    }

    def read(names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, read_tensor(locations[name], name)

    return StoredWeights(str(opened.path), forms, read, opened.extra)
