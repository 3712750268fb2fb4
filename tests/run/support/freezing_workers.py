"""Workers that freeze layers and change their layout while they train."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.core.program import Program
from hocket.freeze import Alpha, ArgminGradient, Policy
from hocket.freeze.policy import LayerObservation, Planned
from hocket.run.cluster.world import World
from tests.run.support.concatenated_batches import ConcatenatedBatches
from tests.run.support.joined import join
from tests.run.support.plainly import classified
from tests.run.support.short_measurements import SHORT
from tests.run.support.started import started

NUM_STEPS: Final = 9
NUM_PARTS: Final = 4
ADAMW: Final = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
RATE: Final = torch.tensor(1e-2, dtype=torch.float64)  # of all stages of a worker
SHAPES: Final[dict[str, Any]] = {
    "recut": {4: (2, 2), 6: (1, 4)},
    "fixed": {},
    "soon": {1: (2, 2), 5: (1, 4)},
    "chosen": None,
    "greedy": None,
    "stays": {},
    "six": {4: (3, 2), 6: (1, 6)},
}
PARTS: Final = {"six": 6}  # microbatches of the whole batch, where not NUM_PARTS
NUM_TRANSITIONS: Final = 20


class Block(nn.Module):
    """A residual block with a norm and dropout."""

    def __init__(self, norm: type[nn.Module], dropout: float) -> None:
        super().__init__()
        self.norm = norm(6)
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """From x_BW to x_BW."""
        return x + torch.tanh(self.dropout(self.linear(self.norm(x))))


class Model(nn.Module):
    """A stem, eight blocks and a head."""

    def __init__(
        self, norm: type[nn.Module] = nn.LayerNorm, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.blocks = nn.Sequential(*(Block(norm, dropout) for _ in range(8)))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """From x_BW to logits_BC."""
        return self.head(self.blocks(self.stem(x)))


def make_model(norm: type[nn.Module] = nn.LayerNorm, dropout: float = 0.2) -> Model:
    """The same each time."""
    torch.manual_seed(5)
    return Model(norm, dropout).double()


def make_batches() -> list[tuple[Tensor, Tensor]]:
    """One for each step, of a size that the microbatches do not divide."""
    return classified([10] * NUM_STEPS, 5, 3, seed=6)


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """The rate moves in each step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5 + t / 8)


def lower(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """The rate drops to a twentieth after six steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.05 ** (t > 5))


OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.05, "scheduler": warm_up},
    "averaged": {"ema_decay": 0.9},
    "lower rate": {"scheduler": lower},
    "all": {"clip_norm": 0.05, "scheduler": warm_up, "ema_decay": 0.9},
    "tensor rate": {
        "clip_norm": 0.05,
        "scheduler": warm_up,
        "ema_decay": 0.9,
        "optimizer": partial(ADAMW, lr=RATE),
    },
}


@dataclass(frozen=True, slots=True)
class OneMore(Planned):
    """Freezes one layer more before each step."""

    def decide(self, state: None, seen: LayerObservation) -> int:
        """One more."""
        return seen.number


@dataclass(frozen=True, slots=True)
class Listed(OneMore):
    """Freezes as many layers as a list says, decision by decision."""

    numbers: tuple[int, ...] = ()

    def decide(self, state: None, seen: LayerObservation) -> int:
        """The next number."""
        return self.numbers[seen.number - 1]


class Flips(OneMore):
    """Freezes four layers and none in turn, for ever."""

    def decide(self, state: None, seen: LayerObservation) -> int:
        """Four, or none."""
        return 4 * (seen.number % 2)


def train_many_layouts() -> Any:
    """Go from 2x1 to 1x2 and back, 20 times, and count process groups.

    Returns:
        The layouts, and the groups and threads after each step.
    """
    measure_briefly()
    world = join()
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(NUM_TRANSITIONS + 3)]
    batch = torch.randn(8, 4), torch.randint(4, (8,))
    found = []
    with started(
        nn.Sequential(*layers),
        F.cross_entropy,
        ADAMW,
        batch,
        freeze=OneMore(every_steps=1),
        shapes={n: (1, 2) if n % 2 else (2, 1) for n in range(NUM_TRANSITIONS + 1)},
        clip_norm=1.0,
        world=world,
    ) as pipeline:
        for _ in range(NUM_TRANSITIONS + 1):
            result = pipeline.step(batch)
            groups = len(dist.distributed_c10d._world.pg_map)
            found.append([result.layout, groups, threading.active_count()])
    return found


def forty_samples() -> ConcatenatedBatches:
    """Without augmentation."""
    return ConcatenatedBatches(classified([40], 4, 4, seed=1))


def train_from_samples() -> Any:
    """Train an epoch whose layout changes midway, and the same batches as a list.

    Returns:
        Layouts and losses of both.
    """
    measure_briefly()
    world = join()
    found = []
    loader = hocket.SampleLoader(forty_samples(), 5, seed=2)
    for batches in (loader, [*hocket.SampleLoader(forty_samples(), 5, seed=2)]):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(7))).double()
        with started(
            model,
            F.cross_entropy,
            ADAMW,
            loader.example(),
            freeze=OneMore(every_steps=4),
            shapes={1: (1, 2)} if batches is loader else {},
            world=world,
        ) as pipeline:
            found.append([[x.layout, x.loss] for x in pipeline.train(batches)])
    return found


def measure_briefly() -> None:
    """Measure no longer than it takes to have numbers."""
    forwards = {"hocket.model.profile.held_layers._BUDGET_S": 1e-9}  # of frozen layers
    for name, value in (SHORT | forwards).items():
        path, _, attribute = name.rpartition(".")
        setattr(import_module(path), attribute, value)


POLICIES: Final[dict[str, Policy[Any]]] = {
    "alpha": Alpha(1 / 2, every_steps=2),
    "gradients": ArgminGradient(1 / 3, patience=1, every_steps=2),
    "there and back": Listed(numbers=(4, 6, 2, 7), every_steps=2),
}


def make_pipeline(
    case: dict[str, str], world: World | None = None, **options: Any
) -> hocket.Pipeline:
    """A pipeline of a case: options, norm, schedule, policy and shapes."""
    norm = getattr(nn, case.get("norm", "LayerNorm"))
    given = {
        "optimizer": ADAMW,
        "num_microbatches": PARTS.get(case["shapes"], NUM_PARTS),
        "freeze": POLICIES[case["policy"]],
        "shapes": SHAPES[case["shapes"]],
        "balance": "greedy" if case["shapes"] == "greedy" else "exact",
        "recut": case["shapes"] != "stays",
        "cut": ("blocks.4",) if case["shapes"] == "stays" else None,
        **OPTIONS[case["options"]],
        **options,
    }
    return hocket.Pipeline(
        make_model(norm, float(case.get("dropout", "0.2"))),
        F.cross_entropy,
        example=make_batches()[0],
        schedule=case.get("schedule", "1f1b"),
        seed=3,
        world=world,
        **given,
    )


def train_freezing(
    shapes: str, options: str, norm: str, schedule: str, policy: str = "alpha"
) -> Any:
    """Train, and return what results say of each step, and the weights."""
    measure_briefly()
    world = join()
    case = {
        "shapes": shapes,
        "options": options,
        "norm": norm,
        "schedule": schedule,
        "policy": policy,
    }
    batches = make_batches()
    with make_pipeline(case, world) as pipeline:
        found = rest_of(pipeline, 0)
        found["evaluated"] = pipeline.evaluate(batches).loss
    return found


def train_batch_norms() -> Any:
    """Train 4x1, 2x2 and 1x4 with batch norms, without dropout.

    Returns:
        What results say of each step; the replica's number, and the running statistics
        that it holds; and the weights.
    """
    measure_briefly()
    world = join()
    with started(
        make_model(nn.BatchNorm1d, dropout=0.0),
        F.cross_entropy,
        ADAMW,
        make_batches()[0],
        num_microbatches=NUM_PARTS,
        freeze=POLICIES["alpha"],
        shapes=SHAPES["recut"],
        world=world,
    ) as pipeline:
        results = [
            [x.num_frozen, x.layout, x.loss] for x in pipeline.train(make_batches())
        ]
        runners = pipeline._executor.runners.values()
        buffers = {n: x.tolist() for r in runners for n, x in r.module.named_buffers()}
        state = {name: x.tolist() for name, x in pipeline.state_dict().items()}
        return results, pipeline._layout.pipeline, buffers, state


def rest_of(pipeline: hocket.Pipeline, first: int) -> dict[str, Any]:
    """Train from a step to the end; results, weights and averages."""
    results = [
        [x.num_frozen, x.layout, x.loss, x.grad_norm]
        for x in pipeline.train(make_batches()[first:])
    ]
    averages = {}
    if any(x.ema is not None for x in pipeline._executor.updaters.values()):
        averages = pipeline.state_dict(ema=True)
    return {
        "results": results,
        "state": {name: x.tolist() for name, x in pipeline.state_dict().items()},
        "averages": {name: x.tolist() for name, x in averages.items()},
    }


def main() -> None:
    """One of torchrun's workers: `FOLDER CASE`; it leaves what it came to."""
    folder, case = sys.argv[1:]
    torch.set_num_threads(1)
    options = json.loads(case)
    shapes = {int(n): tuple(x) for n, x in options.pop("change").items()}
    batches = make_batches()
    endless = itertools.cycle(batches) if options.pop("endless", False) else batches
    flips = endless is not batches
    policy = Flips(every_steps=2) if flips else POLICIES[options["policy"]]
    freeze: dict[str, Any] = {"freeze": policy, "shapes": shapes}
    pauses = options.pop("pauses", None)  # this rank, after two steps
    freeze["timeout_s"] = options.pop("timeout_s", 60.0)
    with make_pipeline(options, run_dir=folder, **freeze) as pipeline:
        rank = pipeline.world.rank
        results = []
        for x in pipeline.train(endless):
            results.append([x.num_frozen, x.layout, x.loss])
            (Path(folder) / f"begun-{rank}").touch()
            if pauses is not None and x.step == 1:
                (Path(folder) / f"paused-{rank}").touch()
                if rank == pauses:
                    signal.pause()
                pipeline.measured()  # gathered by way of the store
        state = {name: x.tolist() for name, x in pipeline.state_dict().items()}
    found = {"results": results, "state": state}
    (Path(folder) / f"rank-{rank}.result.json").write_text(json.dumps(found))


def emulated(
    options: str,
    norm: str,
    num_frozen: Sequence[int],
    num_steps: int = NUM_STEPS,
    num_replicas: int = 1,
    num_parts: int = NUM_PARTS,
) -> tuple[list[float], Model]:
    """One process that freezes as many layers at each step."""
    model = make_model(getattr(nn, norm))
    history = hocket.emulate(
        Program.chain([0], num_parts // num_replicas, num_replicas=num_replicas),
        model,
        F.cross_entropy,
        ADAMW,
        make_batches()[:num_steps],
        dict(enumerate(num_frozen)),
        seed=3,
        clip_norm=OPTIONS[options].get("clip_norm"),
        schedulers=OPTIONS[options].get("scheduler"),
    )
    return [losses["loss"] for losses in history], model


if __name__ == "__main__":
    main()
