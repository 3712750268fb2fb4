"""What two workers do whose training differs by rank, or would by stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler

import hocket
from hocket.errors import HocketError
from hocket.freeze import Alpha, LayerObservation, Measures
from hocket.run.cluster.world import World
from tests.run.support.joined import join
from tests.run.support.refused_workers import Layer, batches

RATE: Final = 0.1
NUM_STEPS: Final = 3
Group = dict[str, Any]
Change = Callable[[int, int, Group], None]  # rank, step, a group of an optimizer


class ClipsByItself(torch.optim.SGD):
    """Limits the norm of all gradients that it sees."""

    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        clip_grad_norm_(params, 5.0)
        return super().step(closure)


def half_on_rank_1(rank: int, step: int, group: Group) -> None:
    """Before the second step, by hand."""
    group["lr"] *= 0.5 if (rank, step) == (1, 1) else 1.0


def half_at_last_on_rank_1(rank: int, step: int, group: Group) -> None:
    """Before the last step, by hand."""
    group["lr"] *= 0.5 if (rank, step) == (1, NUM_STEPS - 1) else 1.0


def half(_: int, step: int, group: Group) -> None:
    """Before the second step, on every rank."""
    group["lr"] *= 0.5 if step == 1 else 1.0


def one_rate(_: int, step: int, group: Group) -> None:
    """Before the second step, on every rank, whatever it was."""
    group["lr"] = 0.3 * RATE if step == 1 else group["lr"]


def smoothed(world: World) -> nn.Module:
    """A loss with an argument that differs."""
    return nn.HuberLoss(delta=1.0 + 0.01 * world.rank)


def named(world: World) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """A loss one part of which has another name on the second rank."""
    return lambda output, targets: {
        "loss": F.mse_loss(output, targets),
        ("a", "b")[world.rank]: output.mean(),
    }


class Never:
    """A policy that freezes nothing, and is no dataclass."""

    every_steps = 1
    layers = None
    measures = Measures.NOTHING

    def begin(self) -> None:
        """Return no state."""

    def observe(self, state: None, seen: LayerObservation) -> None:
        """Return no state."""

    def decide(self, state: None, seen: LayerObservation) -> int:
        """Return none."""
        return 0


def cached(rank: int) -> dict[str, Any]:
    """Keep outputs as they are computed on rank 0, and rounded on rank 1."""
    dtype = (None, "bfloat16")[rank]
    cache = hocket.Cache("cache", ram_bytes=1000, disk_bytes=0, dtype=dtype)
    return {"freeze": Never(), "cache": cache}


def eval_on(ranks: tuple[int, ...], rank: int, step: int, model: nn.Module) -> None:
    """Before the second step, on some ranks, the first layer evaluates."""
    if rank in ranks and step == 1:
        model.get_submodule("0").eval()


FLUSH_FREE: Final = {"schedule": "pipedream-2bw"}
DECAY: Final = {"scheduler": partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)}
WARM_UP: Final = {"scheduler": partial(lr_scheduler.LambdaLR, lr_lambda=float)}
LAYER_WISE: Final = {"layer_wise": True}
CASES: Final[dict[str, dict[str, Any]]] = {
    "flushed": {"change": half_on_rank_1, **DECAY},
    "from 0": {"change": half_on_rank_1, **WARM_UP},
    "clipped": {"change": half_on_rank_1, "clip_norm": 1.0, **LAYER_WISE},
    "flush-free": {"change": half_on_rank_1, **FLUSH_FREE},
    "flush-free, clipped": {"change": half_on_rank_1, "clip_norm": 1.0, **FLUSH_FREE},
    "flush-free, last": {"change": half_at_last_on_rank_1, **FLUSH_FREE},
    "replicas": {"change": half_on_rank_1, "num_replicas": 2},
    "all alike": {"change": half, **LAYER_WISE, **DECAY},
    "all alike, flush-free": {"change": half, **FLUSH_FREE, **DECAY},
    "all alike, replicas": {"change": half, "num_replicas": 2},
    "one rate": {"change": one_rate, **LAYER_WISE},
    "mode": {"alter": partial(eval_on, (1,))},
    "mode, replicas": {"alter": partial(eval_on, (1,)), "num_replicas": 2},
    "all alike, mode": {"alter": partial(eval_on, (0, 1))},
    "loss": {"loss_of": smoothed},
    "loss, replicas": {"loss_of": smoothed, "num_replicas": 2},
    "names of losses": {"loss_of": named},
    "joint steps": {"optimizer": partial(ClipsByItself, lr=RATE)},
    "every_steps": {
        "freezes": lambda rank: {"freeze": Alpha(0.2, every_steps=2 - rank)}
    },
    "freeze on one": {"freezes": lambda rank: {"freeze": None if rank else Alpha(0.2)}},
    "shapes": {"freezes": lambda rank: {"freeze": Never(), "shapes": {rank: (2, 1)}}},
    "cache": {"freezes": cached},
    "all alike, freeze": {"freezes": lambda _: {"freeze": Never(), "shapes": {}}},
}


def train_all(names: list[str], folder: str) -> dict[str, list[Any]]:
    """Train each case; return its error on this worker, and the steps it was given."""
    world = join()
    reported = {}
    for name in names:
        steps: list[int] = []
        reported[name] = ["", "", steps]
        try:
            _train(world, folder, steps, **CASES[name])
        except HocketError as error:
            reported[name] = [type(error).__name__, str(error), steps]
    return reported


def _train(
    world: World,
    folder: str,
    steps: list[int],
    *,
    change: Change | None = None,
    loss_of: Callable[[World], Any] = lambda _: F.mse_loss,
    layer_wise: bool = False,
    freezes: Callable[[int], dict[str, Any]] | None = None,
    alter: Callable[[int, int, nn.Module], None] | None = None,
    **settings: Any,
) -> None:
    """Train, and change the rates of each group before each step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(4))).double()
    data = list(batches())
    made: list[torch.optim.Optimizer] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        rates = {n: RATE * (1 + layer_wise * int(n[0])) for n, _ in parameters.named()}
        groups = [{"params": [p], "lr": rates[n]} for n, p in parameters.named()]
        made.append(torch.optim.SGD(groups, RATE))
        return made[-1]

    asked: dict[str, Any] = {
        "schedule": "1f1b",
        "num_microbatches": 2,
        "optimizer": optimizer,
        "cut": None if freezes or "num_replicas" in settings else ["2"],
        "profile_dir": Path(folder).parent / "profiles",
        **settings,
        **({} if freezes is None else freezes(world.rank)),
    }
    with hocket.Pipeline(
        model, loss_of(world), example=data[0], world=world, **asked
    ) as pipeline:
        for step, batch in enumerate(data):
            for group in (x for each in made for x in each.param_groups):
                if change is not None:
                    change(world.rank, step, group)
            if alter is not None:
                alter(world.rank, step, model)
            pipeline.step(batch)
            steps.append(step)
