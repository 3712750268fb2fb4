"""Small checkpoints without a pipeline: every number in one of them tells its step."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.run.checkpoint.collect import Share
from hocket.run.checkpoint.commit import Order, commit
from hocket.run.checkpoint.exchange.export import open_one
from hocket.run.checkpoint.format.manifest import Group, Run, Section, Updates
from hocket.run.checkpoint.format.read import read_tensors
from hocket.run.cluster.store_exchange import Exchange

TIMEOUT_S: Final = 20.0


def alone() -> Exchange:
    """What one worker without others exchanges facts through."""
    return Exchange(dist.HashStore(), 0, 1, TIMEOUT_S)


def share_of(step: int, rank: int = 0) -> Share:
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
    updates = Updates("AdamW", (Group({"lr": 0.1}, (name,)),), {name: state})
    tensors = {Section.WEIGHTS: weights, Section.OPTIMIZER: kept, Section.OLD: old}
    return Share(rank, 0, tensors, (updates,), {})


def save(folder: Path, step: int, keep: int | None = 3) -> Path:
    """A checkpoint of one worker."""
    folder.mkdir(exist_ok=True)
    order = Order(folder, run_of(step), keep)
    return commit(order, lambda: share_of(step), alone())


def save_by_two(folder: Path, step: int) -> Path:
    """A checkpoint of two workers, in threads."""
    folder.mkdir(exist_ok=True)
    store = dist.HashStore()
    order = Order(folder, run_of(step), 3)

    def work(rank: int) -> Path:
        exchange = Exchange(store, rank, 2, TIMEOUT_S)
        return commit(order, lambda: share_of(step, rank), exchange)

    other = threading.Thread(target=work, args=(1,))
    other.start()
    path = work(0)
    other.join()
    return path


def run_of(step: int) -> Run:
    """What a checkpoint of that step is of."""
    return Run(step=step, data={"step": step})


def numbers_in(path: Path) -> set[float]:
    """Every number in a checkpoint, each read and compared with its hash."""
    opened = open_one(path)
    places = {
        (section, name): place
        for section in Section
        for name, place in opened.places(section).items()
    }
    found: dict[Any, Tensor] = read_tensors(places)
    numbers = {x for tensor in found.values() for x in tensor.flatten().tolist()}
    return numbers | {float(opened.manifest.run.data["step"])}


def files_below(folder: Path) -> set[str]:
    """What a folder holds, but for the lock."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return names - {"lock"}
