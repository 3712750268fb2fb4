"""Overlapping steps and several lanes train to the emulator's weights."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.core.op import Kind
from hocket.core.schedule import Lane, Schedule
from hocket.passes.split_backward import split_backward
from hocket.run.cluster.world import World
from tests.run.support.forked import answers_of
from tests.run.support.joined import join
from tests.run.support.rank_0_oracle import compared_on_rank_0
from tests.run.support.started import started

NUM_STEPS = 7
NUM_MICROBATCHES = 4


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make an optimizer that is sensitive to small differences."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def make_model() -> nn.Sequential:
    """Make seven layers in float64, the same on every worker."""
    torch.manual_seed(0)
    middle = [x for _ in range(5) for x in (nn.Tanh(), nn.Linear(16, 16))]
    return nn.Sequential(nn.Linear(8, 16), *middle, nn.Linear(16, 4)).double()


def make_batches() -> list[tuple[Tensor, Tensor]]:
    """Make one batch per step."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(8, 8, generator=generator, dtype=torch.float64),
            torch.randn(8, 4, generator=generator, dtype=torch.float64),
        )
        for _ in range(NUM_STEPS)
    ]


def weight_gradients_aside(schedule: Schedule) -> Schedule:
    """Move each device's weight gradients into a lane of their own."""
    lanes = []
    for lane in schedule.lanes:
        aside = [op for op in lane.ops if op.kind is Kind.BACKWARD_WEIGHT]
        others = [op for op in lane.ops if op.kind is not Kind.BACKWARD_WEIGHT]
        lanes.append(replace(lane, ops=tuple(others)))
        lanes.append(Lane(lane.device, 1, tuple(aside)))
    return Schedule(schedule.program, tuple(lanes))


def order_of(name: str, *, splits: bool, aside: bool) -> Schedule:
    """Make an order on two devices."""
    overlaps = name.startswith(("wpipe", "pipedream"))
    order = hocket.make_schedule(
        name,
        num_devices=2,
        num_microbatches=NUM_MICROBATCHES,
        num_steps=6 if overlaps else 1,
    )
    if splits:
        order = split_backward(order)
    return weight_gradients_aside(order) if aside else order


def train_all(cases: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Train each case; the largest difference of any weight to the emulator's."""
    with closing(join()) as world:
        return {name: _difference(world, **case) for name, case in cases.items()}


def _difference(
    world: World,
    schedule: str,
    *,
    splits: bool = False,
    aside: bool = False,
    **settings: Any,
) -> float:
    order, batches = order_of(schedule, splits=splits, aside=aside), make_batches()
    # Measured times would choose another cut each time, and so round norms otherwise.
    num_stages = order.program.num_stages
    cut = [str(2 * (6 * i // num_stages)) for i in range(1, num_stages)]
    with started(
        make_model(),
        nn.functional.mse_loss,
        adamw,
        batches[0],
        schedule=order,
        num_microbatches=NUM_MICROBATCHES,
        cut=cut,
        world=world,
        **settings,
    ) as pipeline:
        losses = [result.loss for result in pipeline.train(batches)]
        state = pipeline.state_dict()
        pipeline.measured()

    def difference() -> float:
        model = make_model()
        emulated = hocket.emulate(
            order.program,
            model,
            nn.functional.mse_loss,
            adamw,
            batches,
            cut_at=cut,
            clip_norm=settings.get("clip_norm"),
        )
        for loss, each in zip(losses, emulated, strict=True):
            assert abs(loss - each["loss"]) <= 1e-12 * abs(loss)
        expected = model.state_dict()
        return max(float((state[n] - x).abs().max()) for n, x in expected.items())

    return compared_on_rank_0(world, {"losses": losses, "state": state}, difference)


CASES: Final[dict[str, dict[str, Any]]] = {
    "halves": {"schedule": "wpipe", "splits": True},
    "halves, one delay": {"schedule": "pipedream-2bw", "splits": True},
    "overlapped halves": {"schedule": "wpipe-overlapped", "splits": True},
    "clipping": {"schedule": "wpipe", "clip_norm": 0.1},
    "compiled halves": {"schedule": "wpipe", "splits": True, "compile": True},
    "a lane for W": {"schedule": "1f1b", "splits": True, "aside": True},
    "two stages, a lane for W": {
        "schedule": "interleaved-1f1b",
        "splits": True,
        "aside": True,
    },
}


COMPILED: Final = {"compiled": {"schedule": "pipedream-2bw", "compile": True}}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "cases", [CASES, pytest.param(COMPILED, marks=pytest.mark.long)], ids=["", "whole"]
)
def test_equals_the_emulator(cases: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Weights and losses, on both of two workers; compiled code rounds differently."""
    for answer in answers_of(f"{__name__}:train_all", cases, folder=tmp_path / "job"):
        assert list(answer) == list(cases)
        for name, difference in answer.items():
            assert difference <= (1e-12 if "compiled" in name else 0.0), name
