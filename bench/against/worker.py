"""A worker of either checkout: trains when it is its turn, and notes when it did.

Uses only what both checkouts have: `hocket.Pipeline`, `hocket.launch`, `bench.models`.

    python worker.py FOLDER SETTINGS      starts two workers; SETTINGS is JSON
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch

import hocket
from bench.models import CASES

LIMIT_S: Final = 300.0  # longer than compare.py waits for the other job


def train(folder: str, settings: dict[str, Any]) -> None:
    """Make a pipeline, then train some steps at each turn until the folder has `end`.

    Args:
        folder: where turns are: a file with the round's number, and answers.
        settings: the case, the schedule, the cut and the steps per turn.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = CASES[settings["case"]]
    batch = case.batch()
    with hocket.Pipeline(
        case.make(),
        case.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-6),
        example=batch,
        schedule=settings["schedule"],
        stages_per_device=settings["stages_per_device"],
        cut=settings["cut"],
        num_microbatches=case.num_microbatches,
        profile_dir=Path(folder, "profile"),
    ) as pipeline:
        rank, number = pipeline.world.rank, 0
        while True:
            until_s = time.monotonic() + LIMIT_S
            while not (turn := Path(folder, f"turn-{number}")).exists():
                if time.monotonic() > until_s:
                    raise TimeoutError(f"no turn {number}: compare.py has ended")
                time.sleep(0.002)
            if turn.read_text() == "end":
                return
            begin_s = time.perf_counter()
            for _ in pipeline.train([batch] * settings["num_steps"]):
                pass
            span = [begin_s, time.perf_counter()]
            answer = Path(folder, f"answer-{number}-{rank}")
            answer.with_suffix(".new").write_text(json.dumps(span))
            answer.with_suffix(".new").rename(answer)
            number += 1


if __name__ == "__main__":
    hocket.launch(
        "worker:train",
        [sys.argv[1], json.loads(sys.argv[2])],
        num_workers=2,
        run_dir=Path(sys.argv[1], "run"),
        timeout_s=120.0,
    )
