"""Checks of a loader before its first batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from time import perf_counter
from typing import Any

from hocket.errors import DataError, SchemaError
from hocket.run.cluster.world import World
from hocket.run.data.batch import kept
from hocket.run.data.reading_processes import begun
from hocket.run.data.sample_loader import PartLoader
from hocket.run.diagnostics.flight_recorder import FlightRecorder


def check_iterable(loader: object) -> None:
    """Refuse what yields no batches, before any worker waits for another.

    Raises:
        DataError: it cannot be iterated over.
    """
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise DataError(
            "the loader must yield batches (inputs, targets), as a DataLoader or a "
            f"list of them does; got {type(loader).__name__}"
        )


def check_same_length(loader: Iterable[Any], world: World) -> bool:
    """Refuse loaders that yield more batches on one worker than on another.

    Every worker must call this.

    Returns:
        Whether all lengths are known.

    Raises:
        SchemaError: their lengths, if they have one, differ; names both.
    """
    lengths = world.gather_json(_length(loader), "length of the loader")
    known = {rank: length for rank, length in enumerate(lengths) if length is not None}
    for rank, length in known.items():
        first = next(iter(known))
        if length != known[first]:
            raise SchemaError(
                f"the loader of rank {first} yields {known[first]} batches, that of "
                f"rank {rank} yields {length}: give every worker the same data, and no "
                "sampler that shares it out (the pipeline hands each worker its part)"
            )
    return len(known) == len(lengths)


def check_last_batch(loader: Iterable[Any], num_parts: int) -> None:
    """Raise DataError before the first step if a DataLoader's last batch is too small.

    Args:
        loader: any iterable; loaders without known sizes are not checked.
        num_parts: microbatches over all replicas.

    Raises:
        DataError: the last batch has fewer samples than microbatches.
    """
    batch_size = getattr(loader, "batch_size", None)
    if not isinstance(batch_size, int) or getattr(loader, "drop_last", False):
        return
    num_samples = _num_samples(loader)
    if not num_samples:
        return
    last = num_samples % batch_size or min(batch_size, num_samples)
    if last < num_parts:
        raise DataError(
            f"{num_samples} samples in batches of {batch_size} leave a last batch "
            f"of {last}, too few for {num_parts} microbatches (over all replicas): use "
            "drop_last=True in the loader, another batch size, or fewer microbatches"
        )


def recorded_batches(
    loader: Iterable[Any],
    recorder: FlightRecorder,
    first_step: int,
    name: str,
    *,
    per_step: int = 1,
    waits_s: list[tuple[float, float]] | None = None,
    reads_ahead: bool = False,
) -> Iterator[Any]:
    """Yield a loader's batches, and record each wait for one.

    Args:
        loader: any iterable.
        recorder: records each wait for a batch.
        first_step: the step of the first batch.
        name: the name of these waits.
        per_step: how many batches a step takes.
        waits_s: gets the begin and end of each wait, in seconds of `perf_counter`.
        reads_ahead: whether a batch is read before the one before was trained on.
    """
    recorder.begin(name, first_step)
    batches = begun(loader)
    for i in count():
        recorder.begin(name, first_step + i // per_step)
        begin_s = perf_counter()
        try:
            batch = next(batches)
        except StopIteration:
            recorder.end()
            return
        recorder.end()
        if waits_s is not None:
            waits_s.append((begin_s, perf_counter()))
        yield kept(batch) if reads_ahead else batch


def _num_samples(loader: Iterable[Any]) -> int | None:
    if isinstance(loader, PartLoader):
        return loader.samples.num_samples
    drawn = getattr(loader, "sampler", None)  # of the dataset, maybe a part only
    return _length(getattr(loader, "dataset", None) if drawn is None else drawn)


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:  # it has none
        return None
