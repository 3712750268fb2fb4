"""What torchrun starts in the tests of several hosts.

    python on_hosts.py train FOLDER SETTINGS     train, and report where the workers are
    python on_hosts.py fail FOLDER CASE          train with a fault (failing.py)

Each is one worker, wherever it runs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.run.cluster.world import World
from hocket.run.comm.shm.transport import memory_domain
from tests.run.support import failing_workers as failing
from tests.run.support.launched_workers import listeners
from tests.run.support.plainly import train_plainly

NUM_STEPS: Final = 4
NUM_MICROBATCHES: Final = 4


def train(folder: Path, settings: dict[str, Any]) -> None:
    """Train a small model; leave its weights, and what each worker knows."""
    torch.set_num_threads(1)
    batches = failing.make_batches(NUM_STEPS)
    with failing.make_pipeline(
        failing.make_model(), batches[0], str(folder), run_dir=folder, **settings
    ) as pipeline:
        losses = [result.loss for result in pipeline.train(batches)]
        state = pipeline.state_dict()
        rank = pipeline.world.rank
        reported = {"losses": losses, **_place_of(pipeline.world)}
        (folder / f"rank-{rank}.json").write_text(json.dumps(reported))
        if rank == 0:
            torch.save(state, folder / "weights.pt")


def plain_loop(num_parts: int) -> tuple[dict[str, Tensor], list[float]]:
    """The same in one process: the weights at the end, and each step's loss."""
    model, batches = failing.make_model(), failing.make_batches(NUM_STEPS)
    losses = train_plainly(
        model, F.cross_entropy, failing.make_optimizer, batches, num_parts=num_parts
    )
    return model.state_dict(), losses


def _place_of(world: World) -> dict[str, Any]:
    places = world.gather_json(memory_domain(), "places in the test")
    return {
        "host": world.hosts.index(world.hosts[world.rank]),
        "address": world.address,
        "offset_s": world.clock_offset_s,
        "attempt": world.attempt,
        "shares_memory_with": [
            rank for rank, other in enumerate(places) if other == memory_domain()
        ],
        "listeners": listeners(os.getpid()),
    }


def main() -> None:
    """Do what the command line says."""
    what, folder, reported = sys.argv[1:]
    settings = json.loads(reported)
    if what == "train":
        train(Path(folder), settings)
    else:
        failing.train(settings, folder)


if __name__ == "__main__":
    main()
