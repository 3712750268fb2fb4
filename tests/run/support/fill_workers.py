"""Two workers that train a pipeline, alone and with its bubbles filled."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hocket
from hocket.run.cluster.world import World
from tests.run.support.joined import join, said
from tests.run.support.started import started

NUM_STEPS = 6
WIDTH = 256


def batches(num: int) -> list[Any]:
    """Return random batches."""
    rng = torch.Generator().manual_seed(0)
    return [
        (torch.randn(64, WIDTH, generator=rng), torch.randn(64, WIDTH, generator=rng))
        for _ in range(num)
    ]


def model() -> nn.Module:
    """Return layers with dropout and batch norm."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH),
            nn.Dropout(0.1),
            nn.ReLU(),
        )
        for _ in range(8)
    ]
    return nn.Sequential(*layers)


def net() -> nn.Module:
    """Return the net that fills: small forwards."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 4)).eval()


def samples(num: int) -> Tensor:
    """Return the data set that it is to go over."""
    return torch.randn(num, 32, generator=torch.Generator().manual_seed(2))


def train(folder: str) -> dict[str, Any]:
    """Train alone; filled, with a save in the middle; and from there."""
    with closing(join()) as world:
        return _report(Path(folder), world)


def _report(folder: Path, world: World) -> dict[str, Any]:
    losses, state = _trained(world, None)
    few = samples(40)
    rows: list[Any] = []
    filled, weights = _trained(world, _fill(few, rows))
    found: dict[str, Any] = {
        "same_losses": filled == losses,
        "same_weights": all(torch.equal(x, weights[k]) for k, x in state.items()),
        "rows": [[r.start, r.stop] for r, _ in rows],
        "same_outputs": all(
            torch.equal(y, net()(few[r.start : r.stop])) for r, y in rows
        ),
    }
    found |= _resumed(folder, world)
    taught = _taught(0), _taught(0)
    alone, _ = _trained(world, None, **taught[0])
    few_rows: list[Any] = []
    beside, _ = _trained(world, _fill(few, few_rows), **taught[1])
    found["same_taught"] = beside == alone != losses
    found["taught_rows"] = [[r.start, r.stop] for r, _ in few_rows]
    errors = {name: _error(world, **options) for name, options in _refused().items()}
    return found | {"errors": errors}


def _taught(ahead: int) -> dict[str, Any]:
    """Return the options of a pipeline with a frozen teacher."""
    return {
        "teachers": {"teacher": hocket.Teacher(model(), look_ahead=ahead)},
        "loss": lambda output, targets, teachers: nn.functional.mse_loss(
            output, targets + teachers["teacher"].own
        ),
    }


def _resumed(folder: Path, world: World) -> dict[str, Any]:
    """Save after two of three steps, and train the third one again."""
    before: list[Any] = []
    after: list[Any] = []
    many = samples(100_000)
    num_saved = 0
    with _pipeline(world, _fill(many, before)) as pipeline:
        for result in pipeline.train(batches(3)):
            if result.step == 1:
                pipeline.save(folder)
                num_saved = len(before)
    with _pipeline(world, _fill(many, after)) as pipeline:
        pipeline.load(folder)
        list(pipeline.train(batches(3)[2:]))
        filling = pipeline.filling
    return {
        "num_samples": filling.num_samples,
        "counts": list(filling.counts),
        "slowdown": filling.predicted_slowdown,
        "before": [[r.start, r.stop] for r, _ in before[:num_saved]],
        "lost": len(before) - num_saved,
        "after": [[r.start, r.stop] for r, _ in after],
    }


def _fill(data: Any, rows: list[Any]) -> hocket.Fill:
    return hocket.Fill(net(), data, lambda r, y: rows.append((r, y)), batch_size=4)


def _refused() -> dict[str, dict[str, Any]]:
    slow = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).eval()
    wide = torch.randn(2048, 512)
    return {
        "long": {"fill": hocket.Fill(slow, wide, print, batch_size=2048)},
        "memory": {"memory_bytes": 1 << 20},
        "overlap": {"schedule": "pipedream-2bw"},
        "differs": {"differs": True},
        "ahead": _taught(1),
    }


def _error(world: World, *, differs: bool = False, **options: Any) -> str:
    fill = _fill(samples(9 + world.rank if differs else 9), [])
    return said(lambda: _pipeline(world, **{"fill": fill, **options}).close())


def _trained(
    world: World, fill: hocket.Fill | None, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    with _pipeline(world, fill, **options) as pipeline:
        results = [x.loss for x in pipeline.train(batches(NUM_STEPS))]
        return results, pipeline.state_dict()


def _pipeline(
    world: World, fill: hocket.Fill | None = None, **options: Any
) -> hocket.Pipeline:
    return started(
        model(),
        options.pop("loss", nn.functional.mse_loss),
        (lambda p: torch.optim.AdamW(p, 1e-3)),
        batches(1)[0],
        num_microbatches=4,
        fill=fill,
        world=world,
        **{"schedule": "1f1b", "cut": ["4"], **options},
    )
