"""Small checkpoints without a pipeline: every number in one of them is its step."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.run.checkpoint.collect import WorkerShare
from hocket.run.checkpoint.commit import SaveJob, commit
from hocket.run.checkpoint.export import open_one
from hocket.run.checkpoint.format.manifest import (
    ParameterGroup,
    RunRecord,
    Section,
    UpdateRecord,
)
from hocket.run.checkpoint.format.opened import read_tensors
from hocket.run.cluster.store.store_exchange import StoreExchange

TIMEOUT_S: Final = 20.0


def alone() -> StoreExchange:
    """What one worker without others exchanges facts through."""
    return StoreExchange(dist.HashStore(), 0, 1, TIMEOUT_S)


def share_of(step: int, rank: int = 0) -> WorkerShare:
    """What a worker writes: all its tensors are full of the step's number."""
    value = float(step)
    name = f"layers.{rank}.weight"
    weights = {
        name: torch.full((5, 3), value),
        f"layers.{rank}.bias": torch.full((7,), value, dtype=torch.bfloat16),
    }
    kept = {
        f"{name}/step": torch.tensor(value),
        f"{name}/exp_avg": torch.full((5, 3), value, dtype=torch.float64),
    }
    old = {f"{name}/{age}": torch.full((5, 3), value) for age in (1, 2)}
    state = {"step": {"#tensor": f"{name}/step", "host": True}}
    updates = UpdateRecord(
        "AdamW", (ParameterGroup({"lr": 0.1}, (name,)),), {name: state}
    )
    tensors = {Section.WEIGHTS: weights, Section.OPTIMIZER: kept, Section.OLD: old}
    return WorkerShare(rank, 0, tensors, (updates,), {})


def save(folder: Path, step: int, keep: int | None = 3) -> Path:
    """A checkpoint of one worker."""
    folder.mkdir(exist_ok=True)
    order = SaveJob(folder, run_of(step), keep)
    return commit(order, lambda: share_of(step), alone())


def save_by_two(folder: Path, step: int) -> Path:
    """A checkpoint of two workers, in threads."""
    folder.mkdir(exist_ok=True)
    store = dist.HashStore()
    order = SaveJob(folder, run_of(step), 3)

    def work(rank: int) -> Path:
        exchange = StoreExchange(store, rank, 2, TIMEOUT_S)
        return commit(order, lambda: share_of(step, rank), exchange)

    other = threading.Thread(target=work, args=(1,))
    other.start()
    path = work(0)
    other.join()
    return path


def run_of(step: int) -> RunRecord:
    """What a checkpoint of that step is of."""
    return RunRecord(step=step, data={"step": step})


def numbers_in(path: Path) -> set[float]:
    """Every number in a checkpoint, each read and compared with its hash."""
    opened = open_one(path)
    locations = {
        (section, name): place
        for section in Section
        for name, place in opened.locations(section).items()
    }
    found: dict[Any, Tensor] = read_tensors(locations)
    numbers = {x for tensor in found.values() for x in tensor.flatten().tolist()}
    return numbers | {float(opened.manifest.run.data["step"])}


def files_below(folder: Path) -> set[str]:
    """What a folder holds, but for the lock."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return names - {"lock"}
