"""Workers that get a SIGTERM while they train, save, and go on in another job."""

from __future__ import annotations

import os
import signal
import time
from itertools import islice
from pathlib import Path
from typing import Any, Final

import hocket
from tests.run.checkpoint.jobs import make_pipeline
from tests.run.support.joined import join
from tests.run.support.small_models import batches

NUM_STEPS: Final = 60
ASKED_AFTER: Final = 2
STEP_S: Final = 0.04  # so that a worker looks in the store before the last step


def train(case: dict[str, Any], folder: str, asked: list[int]) -> list[float]:
    """Train, and go on where a job before has saved; return the losses of all steps.

    Args:
        case: the pipeline's.
        folder: of checkpoints.
        asked: the ranks that get a SIGTERM after a step; none in the job that goes on.
    """
    losses: list[float] = []
    world = join()
    with make_pipeline(world, case) as pipeline:

        def save() -> None:
            pipeline.save(folder, data=losses)

        if hocket.checkpoint.newest(Path(folder)):
            losses += pipeline.load(folder)
        data = batches(case["model"], NUM_STEPS, 16, 16)
        with pipeline.on_sigterm(save):
            for result in pipeline.train(islice(data, len(losses), None)):
                losses.append(result.loss)
                time.sleep(STEP_S if asked else 0.0)
                if result.step == ASKED_AFTER and world.rank in asked:
                    os.kill(os.getpid(), signal.SIGTERM)
    return losses
