"""What the workers of the tests of optimistic updates do."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.core.op import Kind
from hocket.errors import HocketError, WaitError
from hocket.run.cluster.world import World, join_world
from hocket.run.engine.step_result import StepResult
from hocket.run.weights.gradients import Gradients
from hocket.run.weights.updater import Updater
from tests.run.support.training_workers import fragile_batches, make_fragile

SLOW_S: Final = 0.05
Events = dict[int, list[str]]


class Slow(nn.Module):
    """Passes its input on, and takes its time for the gradient."""

    def forward(self, x_BW: Tensor) -> Tensor:
        """From x_BW to x_BW."""
        passed: Tensor = _Slow.apply(x_BW)  # type: ignore[no-untyped-call]
        return passed


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BW: Tensor) -> Tensor:
        return x_BW.clone()

    @staticmethod
    def backward(ctx: Any, grad_BW: Tensor) -> Tensor:
        time.sleep(SLOW_S)
        return grad_BW


def slow_first(schedule: str, folder: str) -> list[dict[str, Any]]:
    """Train a model whose first stage ends last; with the barrier, and without."""
    torch.set_num_threads(1)
    world = join_world()
    return [
        _slow_first(world, schedule, folder, optimistic=optimistic)
        for optimistic in (False, True)
    ]


def _slow_first(
    world: World, schedule: str, folder: str, *, optimistic: bool
) -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), Slow(), nn.Linear(6, 3)).double()
    data = fragile_batches(3, poisoned=0)
    data = [(x + 0.1, y) for x, y in data]
    with (
        hocket.Pipeline(
            model,
            F.cross_entropy,
            optimizer=lambda p: torch.optim.AdamW(p, lr=0.1),
            example=data[0],
            schedule=schedule,
            num_microbatches=4,
            cut=["2"],
            clip_norm=1e3,
            optimistic_updates=optimistic,
            profile_dir=Path(folder) / "profiles",
            world=world,
        ) as pipeline,
        noted() as events,
    ):
        for batch in data:
            pipeline.step(batch)
        timeline = pipeline.measured()
    first, last = (
        [span for span in timeline.spans if span.op.stage == stage] for stage in (0, 1)
    )
    (update,) = (span for span in last if span.op.kind is Kind.UPDATE)
    backwards = [span for span in first if span.op.kind is Kind.BACKWARD]
    return {
        "updates_s": update.start_s,
        "complete_s": max(span.end_s for span in backwards),
        "events": {str(step): told for step, told in events.items()},
    }


@contextmanager
def noted() -> Iterator[Events]:
    """What this worker does at the end of each step, in its order."""
    events: Events = defaultdict(list)
    step = 0
    tell, learn, update = Gradients.tell, Gradients.learn, Updater.update

    def tell_and_note(gradients: Gradients, number: int) -> None:
        nonlocal step
        step = number
        events[step].append("tells")
        tell(gradients, number)

    def learn_and_note(gradients: Gradients) -> Any:
        # Knowing already, it does not wait; and to know at once is as good as later.
        known = gradients.is_known()
        events[step].append("knows" if known else "waits")
        return learn(gradients)

    def update_and_note(updater: Updater) -> None:
        events[step].append("updates")
        update(updater)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gradients, "tell", tell_and_note)
        patch.setattr(Gradients, "learn", learn_and_note)
        patch.setattr(Updater, "update", update_and_note)
        yield events


def fragile_twice(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Train until a gradient is not finite; with the barrier, and without."""
    torch.set_num_threads(1)
    world = join_world()
    answers = []
    for case in cases:
        told, weights = zip(
            *(
                _fragile(world, case, folder, optimistic=optimistic)
                for optimistic in (False, True)
            ),
            strict=True,
        )
        same = all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
        answers.append({"told": told, "same": same})
    return answers


def _fragile(
    world: World, case: dict[str, Any], folder: str, *, optimistic: bool
) -> tuple[list[str], list[Tensor]]:
    """What was told in the end, and all weights that are trained here."""
    model = make_fragile()
    poisoned = case["poisoned"]
    batches = fragile_batches(case["num_batches"], poisoned=poisoned)
    told = ["", ""]
    pipeline = hocket.Pipeline(
        model,
        F.cross_entropy,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.1),
        example=batches[0],
        num_microbatches=case["num_microbatches"],
        num_replicas=case.get("num_replicas", 1),
        transport=case.get("transport", "auto"),
        optimistic_updates=optimistic,
        profile_dir=Path(folder) / "profiles",
        world=world,
    )
    try:
        list(pipeline.train(batches))
    except HocketError as error:
        told = [type(error).__name__, str(error)]
    return told, [p.detach() for p in model.parameters()]


class Wary(nn.Module):
    """Refuses inputs above a limit."""

    def forward(self, x_BW: Tensor) -> Tensor:
        """From x_BW to x_BW."""
        passed: Tensor = _Wary.apply(x_BW)  # type: ignore[no-untyped-call]
        return passed


class _Wary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BW: Tensor) -> Tensor:
        if x_BW.abs().max() > 1e5:
            raise ValueError("these inputs are too large")
        return x_BW.clone()

    @staticmethod
    def backward(ctx: Any, grad_BW: Tensor) -> Tensor:
        return grad_BW


def wary(folder: str) -> list[str]:
    """Train such a model with steps that must be clipped."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), Wary(), nn.Linear(6, 3)).double()
    data = [(x * 1e3, y) for x, y in fragile_batches(4, poisoned=0)]
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            hocket.Pipeline(
                model,
                F.cross_entropy,
                optimizer=lambda p: torch.optim.SGD(p, lr=10.0),
                example=data[0],
                schedule="1f1b",
                num_microbatches=4,
                cut=["2"],
                clip_norm=1e-3,
                optimistic_updates=True,
                profile_dir=Path(folder) / "profiles",
                world=join_world(),
            ) as pipeline,
        ):
            patch.setattr(Gradients, "is_known", lambda _: False)
            list(pipeline.train(data))
    except HocketError as error:
        return [type(error).__name__, str(error), repr(error.__cause__)]
    return []


def left_in_doubt(folder: str) -> list[str]:
    """Ask for a norm, twice, when the block around the pipeline has failed."""
    torch.set_num_threads(1)
    example = fragile_batches(1, poisoned=0)[0][0] + 0.1, torch.zeros(8, 3).double()
    result: StepResult | None = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gradients, "is_known", lambda _: False)
        with (
            suppress(KeyError),
            hocket.Pipeline(
                make_fragile(),
                F.mse_loss,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                example=example,
                num_microbatches=4,
                optimistic_updates=True,
                profile_dir=Path(folder) / "profiles",
                world=join_world(),
            ) as pipeline,
        ):
            result = pipeline.step(example)
            pipeline.world.barrier("in doubt")  # nobody closes what others still need
            raise KeyError
    assert result is not None
    told = []
    for _ in range(2):
        with pytest.raises(WaitError) as error:
            _ = result.grad_norm
        told.append(str(error.value))
    return told


def looked_at(folder: str, num_frozen: int) -> dict[str, bool]:
    """All that one can look at between two steps, of which the first one clips."""
    torch.set_num_threads(1)
    world = join_world()
    barrier, optimistic = (
        _looks(world, folder, num_frozen, optimistic=optimistic)
        for optimistic in (False, True)
    )
    return {name: _alike(value, optimistic[name]) for name, value in barrier.items()}


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def _looks(
    world: World, folder: str, num_frozen: int, *, optimistic: bool
) -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model[:num_frozen].requires_grad_(requires_grad=False)
    data = [(x + 0.1, y) for x, y in fragile_batches(8, poisoned=0)]
    checkpoints = Path(folder) / f"checkpoints-{optimistic}"
    found: dict[str, Any] = {}
    with hocket.Pipeline(
        model,
        F.cross_entropy,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.1),
        example=data[0],
        num_microbatches=4,
        cut=["2"],
        clip_norm=1e-2,
        ema_decay=0.5,
        optimistic_updates=optimistic,
        profile_dir=Path(folder) / "profiles",
        world=world,
    ) as pipeline:
        pipeline.step(data[0])
        found["state"] = pipeline.state_dict()
        pipeline.step(data[1])
        found["averages"] = pipeline.state_dict(ema=True)
        pipeline.step(data[2])
        found["loss"] = pipeline.evaluate(data).loss
        pipeline.step(data[3])
        found["averaged loss"] = pipeline.evaluate(data, use_ema=True).loss
        pipeline.step(data[4])
        pipeline.save(checkpoints)
        # One worker looks alone: nobody else need know.
        result = pipeline.step(data[5])
        if world.rank == 0:
            found["norm"] = result.grad_norm
        found["norm later"] = pipeline.step(data[6]).grad_norm
        found["end"] = pipeline.state_dict()
        pipeline.step(data[7])
        pipeline.load(checkpoints)
        found["loaded"] = pipeline.state_dict()
        pipeline.step(data[5])
    found["closed"] = [p.detach().clone() for p in model.parameters()]
    found["closed"] = dict(enumerate(found["closed"]))
    return found
