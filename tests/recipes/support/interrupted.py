"""Runs that break off, and what they leave behind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hocket.errors import RunError
from hocket.recipes.run_files import CHECKPOINTS_NAME, METRICS_NAME
from hocket.recipes.training.records import StepRecord, Watcher
from hocket.run.checkpoint.format.folder import saved

SMALL: Final = (
    "model.width=16",
    "model.num_heads=2",
    "model.num_blocks=1",
    "model.mlp_width=16",
    "model.dropout=0.1",
    "training.batch_size=200",  # of 1347: six batches per epoch
    "training.accumulate=4",  # so that most steps end in the middle of one
    "training.num_epochs=4",
    "training.clip_norm=1.0",
    "training.ema_decay=0.5",
    "training.evaluate_every_epochs=",  # takes away what the recipe says
    "training.evaluate_every_steps=3",
    "optimizer.num_warmup_steps=2",
    "checkpoint.every_steps=2",
    "pipeline.num_workers=1",
    "pipeline.num_microbatches=2",
    "pipeline.cut=[]",
    "run.profile_folder=profiles",
)


class InterruptedRunError(RunError):
    """What ends a run."""


@dataclass
class Interrupter(Watcher):
    """Ends a run after a step, as a person or a failure would."""

    last_step: int

    def step(self, record: StepRecord) -> None:
        """Go on, or not."""
        if record.step == self.last_step:
            raise InterruptedRunError


def ends_after_step_3(run_dir: Path) -> Interrupter:
    """A recipe's callback."""
    return Interrupter(3)


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """What a run has written down of one kind, without what the clock has a part in."""
    lines = map(json.loads, (run_dir / METRICS_NAME).read_text().splitlines())
    timed = ("seconds", "samples_per_s", "bubble_fraction", "peak_bytes")
    return [
        {key: value for key, value in line.items() if key not in timed}
        for line in lines
        if line["kind"] == kind
    ]


def last_weights(run_dir: Path) -> dict[str, Tensor]:
    """What the newest checkpoint holds, by file and name."""
    from safetensors.torch import load_file

    newest = saved(run_dir / CHECKPOINTS_NAME)[-1]
    return {
        f"{path.name}/{name}": tensor
        for path in sorted(newest.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) for name in one
    )
