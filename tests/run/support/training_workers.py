"""What the workers of the training tests do: train, and leave everything behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import hocket
from hocket.errors import HocketError, WaitError
from hocket.run.cluster.world import World, join_world
from hocket.run.engine.sync.step_result import StepResult
from tests.run.support.captured_once import captured_once
from tests.run.support.joined import join
from tests.run.support.optimizers import GRADIENTS, OPTIMIZERS, make_scheduler
from tests.run.support.started import started
from tests.run.support.training_loop import data_of, loss_of, model_of

SETTINGS = (
    *("clip_norm", "accumulate", "precision", "ema_decay", "stages_per_device"),
    "recompute",
)


def train_all(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Train every case in one job."""
    world = join()
    answers = []
    with captured_once() as shelf:
        for i, case in enumerate(cases):
            name = ", ".join([case["model"], *filter(None, [case.get("precision")])])
            model = shelf.model(name, partial(model_of, case))
            answers.append(_train(world, case, Path(folder) / f"{i}", model))
    return answers


def _train(
    world: World, case: dict[str, Any], stem: Path, model: nn.Module
) -> dict[str, Any]:
    data = data_of(case)
    pipeline = started(
        model,
        loss_of(case),
        OPTIMIZERS[case.get("optimizer", "adamw")],
        data[0],
        scheduler=make_scheduler if case.get("scheduler") else None,
        schedule=_schedule(case),
        num_microbatches=case["num_microbatches"],
        num_replicas=case["num_replicas"],
        profile_dir=stem.parent / "profiles",
        world=world,
        transport=case.get("transport", "auto"),
        **{key: case[key] for key in SETTINGS if key in case},
    )
    GRADIENTS.clear()  # those of measuring the update
    results = list(pipeline.train(data))
    _save(pipeline.state_dict(), world, stem, "state")
    averaged = None
    if "ema_decay" in case:
        _save(pipeline.state_dict(ema=True), world, stem, "ema")
        averaged = pipeline.evaluate(data, use_ema=True).loss
        _save(pipeline.state_dict(), world, stem, "after")
    gradients = {f"{i}/{n}": x for i, named in _steps(case) for n, x in named.items()}
    save_file(gradients, f"{stem}.gradients-{world.rank}")
    answer = {
        "losses": [result.losses for result in results],
        "norms": [result.grad_norm for result in results],
        "skipped": [result.skipped for result in results],
        "num_samples": [result.num_samples for result in results],
        "boundaries": list(pipeline.plan.boundaries),
        "averaged": averaged,
        "measured_ops": sum(1 for _ in pipeline.measured().spans),
    }
    pipeline.close()
    return answer


def _schedule(case: dict[str, Any]) -> Any:
    """By name; or given, with updates in the middle of a lane."""
    text = case.get("order")
    return case["schedule"] if text is None else hocket.Schedule.parse(text)


def _steps(case: dict[str, Any]) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The gradients of this worker's stages, by step."""
    per_step = len(GRADIENTS) // case["num_steps"] or 1
    for i, named in enumerate(GRADIENTS):
        yield i // per_step, named


def _save(state: dict[str, Tensor], world: World, stem: Path, what: str) -> None:
    if world.rank == 0:
        tensors = {name: t.clone().contiguous() for name, t in state.items()}
        save_file(tensors, f"{stem}.{what}")


class Length(nn.Module):
    """Adds its input's length; the gradient of a length of 0 is not a number."""

    def forward(self, x_BW: Tensor) -> Tensor:
        """From x_BW to x_BW."""
        return x_BW + x_BW.square().sum(1, keepdim=True).sqrt()


def make_fragile() -> nn.Sequential:
    """A model whose loss stays finite where the first layer's gradient does not."""
    torch.manual_seed(3)
    layers = [nn.Linear(6, 6, bias=False), Length(), nn.Linear(6, 6)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(6, 3)).double()


def fragile_batches(num_batches: int, poisoned: int) -> list[tuple[Tensor, Tensor]]:
    """Vectors, of which one in the poisoned batch has length 0."""
    rng = torch.Generator().manual_seed(5)
    batches = [
        (
            torch.randn(8, 6, generator=rng, dtype=torch.float64),
            torch.randint(3, (8,), generator=rng),
        )
        for _ in range(num_batches)
    ]
    batches[poisoned][0][5] = 0.0
    return batches


def fragile_all(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Train fragile models until a gradient is not finite."""
    world = join()
    return [_fragile(world, case, folder) for case in cases]


def _fragile(world: World, case: dict[str, Any], folder: str) -> dict[str, Any]:
    model = make_fragile()
    batches = fragile_batches(6, poisoned=4)
    pipeline = hocket.Pipeline(
        model,
        F.cross_entropy,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.1),
        example=batches[0],
        profile_dir=Path(folder) / "profiles",
        world=world,
        **case,
    )
    reported, num_done = ["", ""], 0
    before: list[Tensor] = []
    try:
        for result in pipeline.train(batches):
            before = [p.detach().clone() for p in model.parameters()]
            num_done = result.step + 1
    except HocketError as error:
        reported = [type(error).__name__, str(error)]
    after = [p.detach() for p in model.parameters()]
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return {"raised": reported, "num_done": num_done, "same": same}


def left_unread(folder: str) -> list[str]:
    """Ask for a norm, twice, when the block around the pipeline has failed."""
    torch.set_num_threads(1)
    batches = [(x + 0.1, y) for x, y in fragile_batches(4, poisoned=0)]
    result: StepResult | None = None
    with (
        suppress(KeyError),
        started(
            make_fragile(),
            F.cross_entropy,
            (lambda p: torch.optim.SGD(p, lr=0.1)),
            batches[0],
            schedule="pipedream-2bw",
            num_microbatches=4,
            profile_dir=Path(folder) / "profiles",
            world=join_world(),
        ) as pipeline,
    ):
        result = pipeline.step(batches[0])
        pipeline.world.barrier("no worker closes what others still need")
        raise KeyError
    assert result is not None
    reported = []
    for _ in range(2):
        with pytest.raises(WaitError) as error:
            _ = result.grad_norm
        reported.append(str(error.value))
    return reported
