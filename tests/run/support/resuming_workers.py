"""Workers that save while layers freeze, load into other layouts, and are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Final

import hocket
from hocket.errors import HocketError
from hocket.freeze import Plasticity
from hocket.freeze.cache import shard
from hocket.freeze.cache.shard import Content, Key, record_of
from hocket.freeze.policy import LayerObservation
from hocket.run.elastic import reshape
from hocket.run.nets.net import transfer
from tests.run.support.cached_workers import (
    BATCH_SIZE,
    NUM_EPOCHS,
    Rows,
    always_pays,
    make_cached,
)
from tests.run.support.forked import mark_fault
from tests.run.support.freezing_workers import (
    NUM_PARTS,
    NUM_STEPS,
    Listed,
    make_batches,
    make_pipeline,
    measure_briefly,
    rest_of,
)
from tests.run.support.joined import join

SAVED_AT: Final = (1, 3, 5)  # in 4x1 with nothing frozen, 2x2 and 1x4
KILLED_AT: Final = 4
TORN_AT: Final = 5  # in 1x2, in the first epoch with a frozen layer


def save_and_resume(case: dict[str, str], folder: str) -> Any:
    """Train and save on the way; then resume each checkpoint in a new pipeline.

    Returns:
        What the uninterrupted run came to, and each resumed one.
    """
    measure_briefly()
    world = join()
    profiles = Path(folder).parent / "profiles"
    with make_pipeline(case, world, profile_dir=profiles) as pipeline:
        results = []
        for x in pipeline.train(make_batches()):
            results.append([x.num_frozen, x.layout, x.loss, x.grad_norm])
            if x.step + 1 in SAVED_AT:
                pipeline.save(folder, data=x.step + 1, keep=None)
        whole = {**rest_of(pipeline, NUM_STEPS), "results": results}
    found = [whole]
    for step in SAVED_AT:
        with make_pipeline(case, world, profile_dir=profiles) as pipeline:
            first = pipeline.load(folder, step=step)
            pipeline.save(f"{folder} again", data=first, keep=None)
            found.append(rest_of(pipeline, first))
    return found


def resume_on_two(case: dict[str, str], folder: str) -> Any:
    """Resume the checkpoints of four workers on two, whose shape stays.

    In the second, layers stay on their devices, too; it is saved again at once.

    Returns:
        What each resumed run came to.
    """
    measure_briefly()
    world = join()
    found = []
    for step, shapes in zip(SAVED_AT[1:], ("fixed", "stays"), strict=True):
        profiles = Path(folder).parent / "profiles"
        own = {**case, "shapes": shapes}
        with make_pipeline(own, world, profile_dir=profiles) as pipeline:
            pipeline.step(make_batches()[0])  # so that there is something to replace
            first = pipeline.load(folder, step=step)
            if shapes == "stays":
                pipeline.save(f"{folder} of two", data=first)
            found.append(rest_of(pipeline, first))
    return found


class Stumbles(Listed):
    """Fails at its second decision."""

    def decide(self, state: None, seen: LayerObservation) -> int:
        """Fail on rank 0, the only one that asks it."""
        if seen.number == 2:
            raise ZeroDivisionError("the user's own mistake")
        return 1


def errors_and_activations() -> Any:
    """Run pipelines that must fail on both workers, and others.

    Returns:
        The errors; the results of a policy that measures activations, and those of two
        replicas with batch norms.
    """
    measure_briefly()
    world = join()
    case = {"options": "plain", "policy": "alpha", "shapes": "fixed"}
    found: dict[str, Any] = {}
    with make_pipeline(
        {**case, "options": "lower rate", "dropout": "0"},
        world,
        freeze=PLASTICITY,
        shapes=TWO_SHAPES,
    ) as pipeline:
        found["activations"] = rest_of(pipeline, 0)["results"]
    cases: dict[str, dict[str, Any]] = {
        "no way back": {
            "freeze": Listed(numbers=(4, 0), every_steps=1),
            "shapes": {0: (1, 2)},
        },
        "policy fails": {"freeze": Stumbles(every_steps=1)},
    }
    replicas = {"num_microbatches": NUM_PARTS // 2, "num_replicas": 2}
    with make_pipeline({**case, "norm": "BatchNorm1d"}, world, **replicas) as pipeline:
        found["batch norms"] = rest_of(pipeline, 0)
    for name, options in cases.items():
        try:
            with make_pipeline(case, world, **options) as pipeline:
                for result in pipeline.train(make_batches()):
                    if name == "no way back" and result.step == 1:
                        limit_memory(pipeline)
        except (HocketError, ZeroDivisionError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


PLASTICITY: Final = Plasticity(window=2, tolerance=0.9, patience=1, every_steps=1)
TWO_SHAPES: Final = {1: (1, 2)}


def limit_memory(pipeline: hocket.Pipeline) -> None:
    """Let no unfrozen model fit on one device from now on."""
    freezing = pipeline._freezing
    assert freezing is not None
    object.__setattr__(freezing._options, "memory_bytes", 1)


def die_in_transition(folder: str) -> None:
    """Save before a transition, in the middle of which rank 1 is killed."""
    measure_briefly()
    world = join()

    def fatal(*args: Any) -> Any:
        if world.rank == 1:
            mark_fault(Path(folder).parent, 1)
            os.kill(os.getpid(), signal.SIGKILL)
        return transfer(*args)

    case = {"options": "all", "policy": "there and back", "shapes": "recut"}
    with make_pipeline(case, world, shapes={6: (1, 2)}) as pipeline:
        for result in pipeline.train(make_batches()):
            pipeline.save(folder, data=result.step + 1)
            if result.step + 1 == KILLED_AT:
                setattr(reshape, "transfer", fatal)  # noqa: B010  (mypy knows the other one)


def die_in_cache_write(folder: str, cache: str) -> None:
    """Save before the step in which rank 1 is killed, with half an entry on disk.

    Its record is whole, as on a disk that orders writes in its own way.
    """
    measure_briefly()
    always_pays()
    world = join()

    def torn(self: shard.Shard, slot: int, key: Key, content: Content) -> None:
        half, record = content.data[: len(content) // 2], record_of(key, content)
        shard._write(self._handle, half, self._content_at(slot))
        shard._write(self._handle, memoryview(record), self._record_at(slot))
        mark_fault(Path(folder).parent, 1)
        os.kill(os.getpid(), signal.SIGKILL)

    loader = hocket.SampleLoader(Rows(), BATCH_SIZE, seed=2)
    with make_cached(cache, shapes={1: (1, 2)}, world=world) as pipeline:
        for _ in range(NUM_EPOCHS):
            for result in pipeline.train(loader):
                if result.step < TORN_AT:
                    pipeline.save(folder, data=loader.state_dict())
                if result.step + 1 == TORN_AT and world.rank == 1:
                    setattr(shard.Shard, "write", torn)  # noqa: B010
