"""A net that is cut again while it trains ends where it would have without."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.model.capture.capture import capture
from hocket.model.stages.cut import StageModule, boundaries_from_names
from hocket.run.cluster.world import World
from hocket.run.comm.bundles import Bundle
from hocket.run.data.batch import Microbatch, split_batch
from hocket.run.nets.net import NetOnWorker, holders_of, plan_moves, transfer
from hocket.run.stage.runner import StageRunner
from hocket.run.weights.migration import (
    CommonState,
    bundle_of,
    restore_updater,
    tensor_in,
)
from hocket.run.weights.settings import TrainingConfig
from hocket.run.weights.updater import Updater
from tests.run.support.forked import answers_of
from tests.run.support.joined import join
from tests.run.support.plainly import classified

CPU: Final = torch.device("cpu")
NUM_MICROBATCHES: Final = 2
SPLIT: Final = 3  # steps before the net is cut again
ADAMW: Final = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """The rate moves in each step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5 + t / 8)


SETTINGS: Final = TrainingConfig(optimizer=ADAMW, scheduler=warm_up)


class Block(nn.Module):
    """A linear layer with statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """From x_BW to x_BW."""
        return torch.tanh(self.dropout(self.norm(self.linear(x))))


def make_model() -> nn.Sequential:
    """Six blocks, the same each time."""
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(6))).double()


def make_batches() -> list[tuple[Tensor, Tensor]]:
    """Six, of sizes that the microbatches do not divide."""
    return classified([7] * (2 * SPLIT), 5, 5, seed=4)


def train_cut_again(cuts: Sequence[str], how: Any) -> dict[str, Any]:
    """Train three steps per cut.

    Args:
        cuts: the module with which the second worker's stage begins, cut by cut.
        how: the model is captured.

    Returns:
        The state of this worker's stage, as lists; and how many tensors came here.
    """
    world = join()
    rank = world.rank
    data = make_batches()
    parts = split_batch(data[0], NUM_MICROBATCHES)
    captured = capture(make_model(), parts[0].leaves, capture=how, cut=cuts)
    net, updater, num_received = NetOnWorker("model", captured), None, 0
    del captured
    for number, name in enumerate(cuts):
        boundaries = boundaries_from_names(net.outline, [name])
        if updater is None:
            stage = net.cut(boundaries, here=[rank])[rank]
            updater = Updater(dict(stage.named_parameters()), SETTINGS)
        else:
            before = boundaries_from_names(net.outline, [cuts[number - 1]])
            stage, updater, came = _cut_again(net, before, boundaries, world, updater)
            num_received += came
        for step in range(number * SPLIT, (number + 1) * SPLIT):
            _step(stage, split_batch(data[step], NUM_MICROBATCHES), step, rank)
            updater.update()
    state = {name: x.tolist() for name, x in net.state_dict().items()}
    return {"state": state, "num_received": num_received}


def _cut_again(
    net: NetOnWorker,
    before: Sequence[int],
    after: Sequence[int],
    world: World,
    updater: Updater,
) -> tuple[StageModule, Updater, int]:
    """Move what the other worker needs, and go on with other stages."""
    workers = [{0}, {1}]
    held, needed = (
        holders_of(net.name, net.names(x), workers) for x in (before, after)
    )
    moves = plan_moves(held, needed, net.num_bytes())
    here = net.tensors

    def bundle(_: str, name: str) -> Bundle:
        own = updater if name in updater.parameters else None
        return bundle_of(name, here[name], own)

    came = transfer(moves, bundle, world)
    received = {name: tensor_in(x) for (_, name), x in came.items()}
    kept = {name: bundle("", name) for name in here}
    stage = net.cut(after, here=[world.rank], received=received)[world.rank]
    new = Updater(dict(stage.named_parameters()), SETTINGS)
    bundles = kept | {name: x for (_, name), x in came.items()}
    restore_updater(new, bundles, CommonState.of([updater]))
    return stage, new, len(came)


def _step(
    stage: StageModule, parts: Sequence[Microbatch], step: int, rank: int
) -> None:
    """All forwards, then all backwards."""
    loss = F.cross_entropy if rank else None
    runner = StageRunner(rank, stage, loss, device=CPU, seed=0)
    runner.train(True)
    total = sum(part.num_samples for part in parts)
    for number, part in enumerate(parts):
        received = [_received(x, part) for x in stage.inputs]
        sent = runner.forward(step, number, part, received, part.num_samples / total)
        for x in sent:
            dist.send(x, 1)
    for number, part in enumerate(parts):
        grads = [_received(x, part) for x in stage.outputs]
        for x in runner.backward(step, number, grads):
            dist.send(x, 0)


def _received(value: Any, part: Microbatch) -> Tensor:
    found = torch.empty(value.shape_for(part.num_samples), dtype=value.dtype)
    dist.recv(found)
    return found


@pytest.mark.parametrize(
    ("cuts", "how"), [(("2", "4"), "sequential"), (("4", "1"), "export")]
)
def test_three_steps_cut_again_three_steps(
    cuts: tuple[str, str], how: str, tmp_path: Path
) -> None:
    """Weights, statistics, AdamW's state, schedule and masks follow, in float64.

    Equal to six steps of one process; and only what the other worker lacked was sent.
    """
    answers = answers_of(
        f"{__name__}:train_cut_again", list(cuts), how, folder=tmp_path
    )
    model = make_model()
    hocket.emulate(
        hocket.Program.chain(range(2), NUM_MICROBATCHES),
        model,
        F.cross_entropy,
        ADAMW,
        make_batches(),
        cut_at=[cuts[1]],
        schedulers=warm_up,
    )
    found = {name: x for answer in answers for name, x in answer["state"].items()}
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = torch.tensor(found[name], dtype=value.dtype)
        torch.testing.assert_close(other, value, rtol=1e-10, atol=1e-12, msg=name)
    first, second = (int(x) for x in cuts)
    per_block = sum(name.startswith("0.") for name in expected)
    moved = [max(0, second - first) * per_block, max(0, first - second) * per_block]
    assert [answer["num_received"] for answer in answers] == moved
