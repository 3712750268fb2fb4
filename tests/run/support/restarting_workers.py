"""What the workers of the restart tests do: train, save now and then, and be killed.

Also a script for torchrun: `python restarting.py FOLDER KILLS`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypedDict

import torch

import hocket
from hocket import env
from hocket.run.checkpoint.format.newest import newest
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from tests.run.support.failing_workers import LINGER, TRAP, make_batches, make_model
from tests.run.support.forked import FAULT
from tests.run.support.plainly import Batch

NUM_STEPS: Final = 8
SAVE_EVERY: Final = 2
TIMEOUT_S: Final = 20.0
WEIGHTS: Final = "weights.pt"
CHECKPOINTS: Final = "checkpoints"


class Kill(TypedDict):
    """When a worker is killed.

    Keys:
        rank: of the worker.
        place: an op, `start`, `joined`, `save`, or `sync` (in the middle of a save).
        when: the step; empty before the first.
    """

    rank: int
    place: str
    when: str


def train(folder: str, kills: list[Kill]) -> dict[str, Any]:
    """Train to the end from wherever there is a checkpoint.

    Args:
        folder: of the test.
        kills: the first that has not happened yet does.
    """
    torch.set_num_threads(1)
    run = Path(folder)
    _set_trap(kills, run)
    TRAP.at("start")
    batches = make_batches(NUM_STEPS)
    with hocket.Pipeline(
        make_model(dropout=0.1),
        torch.nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        example=batches[0],
        num_microbatches=4,
        clip_norm=0.2,  # some steps clip, and some do not
        cut=["15"],  # random numbers belong to a stage, so each must stay what it is
        profile_dir=run.parent / "profiles",
        run_dir=run,
        timeout_s=TIMEOUT_S,
    ) as pipeline:
        TRAP.at("joined")
        first = 0
        if newest(run / CHECKPOINTS) is not None:
            first = pipeline.load(run / CHECKPOINTS)["next"]
        for result in pipeline.train(_timed(batches[first:], first)):
            done = result.step + 1
            if done % SAVE_EVERY == 0:
                pipeline.save(run / CHECKPOINTS, data={"next": done})
        state = pipeline.state_dict()
        if pipeline.is_main:
            torch.save(state, run / WEIGHTS)
        return {"attempt": pipeline.world.attempt, "first": first}


def _timed(batches: Iterable[Batch], first: int) -> Iterator[Batch]:
    for step, batch in enumerate(batches, start=first):
        TRAP.now = str(step)
        yield batch


def _set_trap(kills: list[Kill], run: Path) -> None:
    """Arm the next kill, if it is this worker's."""
    TRAP.now, TRAP.place, TRAP.fault = "", "", LINGER
    waiting = [k for k in range(len(kills)) if not (run / f"kill-{k}" / FAULT).exists()]
    if not waiting or kills[waiting[0]]["rank"] != env.RANK.integer():
        return
    kill = kills[waiting[0]]
    TRAP.place, TRAP.when, TRAP.fault = kill["place"], kill["when"], "kill"
    TRAP.folder = str(run / f"kill-{waiting[0]}")
    Path(TRAP.folder).mkdir(exist_ok=True)
    begin, sync = FlightRecorder.begin, os.fsync

    def begin_and_tell(recorder: FlightRecorder, op: str, step: int) -> None:
        begin(recorder, op, step)
        TRAP.at(op)

    def sync_and_tell(fd: Any) -> None:
        TRAP.at("sync")
        sync(fd)

    setattr(FlightRecorder, "begin", begin_and_tell)  # noqa: B010  (mypy knows the other one)
    os.fsync = sync_and_tell


def main() -> None:
    """One of torchrun's workers."""
    folder, kills = sys.argv[1:]
    reported = train(folder, json.loads(kills))
    name = f"rank-{env.RANK.text()}.result.json"
    (Path(folder) / name).write_text(json.dumps(reported))


if __name__ == "__main__":
    main()
