"""What a loop freezes under way is followed, in each order and form of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import hocket
from tests.run.support.forked import answers_of
from tests.run.support.started import started

pytestmark = pytest.mark.timeout(240)

WAYS: Final[dict[str, dict[str, Any]]] = {
    "split backwards": {"schedule": "zb-h1"},
    "recomputed": {"schedule": "1f1b", "recompute": "all"},
    "replicas": {"schedule": "1f1b", "num_replicas": 2},
}
NUM_STEPS: Final = 5


def make_net() -> nn.Sequential:
    """Four layers of float64."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3)]
    return nn.Sequential(*layers).double()


def make_batches() -> list[tuple[Tensor, Tensor]]:
    """A batch per step."""
    rng = torch.Generator().manual_seed(1)
    made = [torch.randn(8, 4 + 3, generator=rng).double() for _ in range(NUM_STEPS)]
    return [(x[:, :4], x[:, 4:]) for x in made]


def freeze(net: nn.Module, step: int) -> None:
    """The first layer for two steps, then all but the last, then nothing."""
    frozen = {1: ["0"], 2: ["0"], 3: ["0", "2"]}.get(step, [])
    for name in ("0", "2"):
        net.get_submodule(name).requires_grad_(requires_grad=name not in frozen)


def make_pipeline(net: nn.Module, **options: Any) -> hocket.Pipeline:
    """Trains it by AdamW, four microbatches a step."""
    return started(
        net,
        nn.functional.mse_loss,
        (lambda weights: torch.optim.AdamW(weights, 0.01)),
        make_batches()[0],
        num_microbatches=4,
        **options,
    )


def train_plain() -> list[float]:
    """The loop without a pipeline: all weights, one after the other."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    for step, (x, y) in enumerate(make_batches()):
        freeze(net, step)
        nn.functional.mse_loss(net(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([x.flatten() for x in net.state_dict().values()]).tolist()


def train_on_two() -> dict[str, list[float]]:
    """Each way, on two workers; as `train_plain` answers."""
    found = {}
    for name, options in WAYS.items():
        net = make_net()
        with make_pipeline(net, clip_norm=0.1, **options) as pipeline:
            for step, batch in enumerate(make_batches()):
                freeze(net, step)
                pipeline.step(batch)
            state = pipeline.state_dict()
        found[name] = torch.cat([x.flatten() for x in state.values()]).tolist()
    return found


def freeze_on_one_rank() -> str:
    """What each rank raises where only rank 0 freezes."""
    net = make_net()
    with make_pipeline(net, schedule="1f1b") as pipeline:
        pipeline.step(make_batches()[0])
        if pipeline.world.rank == 0:
            net[2].requires_grad_(requires_grad=False)
        try:
            pipeline.step(make_batches()[1])
        except hocket.HocketError as error:
            return str(error)
    return "nothing"


def test_as_the_plain_loop(tmp_path: Path) -> None:
    """Split, recomputed, and reduced over replicas, with the norm of what is left."""
    expected = torch.tensor(train_plain(), dtype=torch.float64)
    for found in answers_of(f"{__name__}:train_on_two", folder=tmp_path):
        assert list(found) == list(WAYS)
        for name, weights in found.items():
            apart = torch.tensor(weights, dtype=torch.float64) - expected
            assert apart.abs().max() <= 1e-10, name


def test_one_rank_alone_is_refused(tmp_path: Path) -> None:
    """The other would train another model."""
    answers = answers_of(f"{__name__}:freeze_on_one_rank", folder=tmp_path)
    assert any("changed" in x for x in answers), answers


def test_unfreezing_what_was_frozen_at_the_start_is_refused() -> None:
    """With the way out that is followed."""
    net = make_net()
    net[0].requires_grad_(requires_grad=False)
    with make_pipeline(net, schedule="1f1b") as pipeline:
        pipeline.step(make_batches()[0])
        net[0].requires_grad_(requires_grad=True)
        with pytest.raises(hocket.ModelError, match="freeze it before the first step"):
            pipeline.step(make_batches()[1])


@pytest.mark.parametrize("freeze", [None, hocket.freeze.Alpha(1 / 4, every_steps=9)])
def test_frozen_for_an_evaluation_only(freeze: Any) -> None:
    """As loops do that turn all gradients off around theirs: nothing has changed."""
    net = make_net()
    options = {"schedule": "1f1b"} if freeze is None else {"freeze": freeze}
    with make_pipeline(net, **options) as pipeline:
        pipeline.step(make_batches()[0])
        net.requires_grad_(requires_grad=False)
        before = pipeline.evaluate(make_batches()[:1]).loss
        net.requires_grad_(requires_grad=True)
        pipeline.step(make_batches()[1])
        assert pipeline.evaluate(make_batches()[:1]).loss != before
