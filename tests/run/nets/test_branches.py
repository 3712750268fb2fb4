"""A loop that makes a model cut apart take another branch is followed by all stages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from hocket.errors import HocketError
from tests.run.support.forked import answers_of
from tests.run.support.started import started

pytestmark = pytest.mark.timeout(240)

WAYS: Final[dict[str, dict[str, Any]]] = {
    "1f1b": {"schedule": "1f1b"},
    "split backwards": {"schedule": "zb-h1", "clip_norm": 0.5},
    "recomputed": {"schedule": "1f1b", "recompute": "all"},
    "interleaved": {"schedule": "interleaved-1f1b", "cut": ["second", "third", "head"]},
    "shards": {"schedule": "1f1b", "num_shards": 2, "cut": None},
}
NUM_STEPS: Final = 6


class Branches(nn.Module):
    """Its own forward decides, by attributes, what it calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.third, self.head = nn.Linear(16, 16), nn.Linear(16, 3)
        self.skips = self.norms = self.is_tied = self.is_turned = self.crosses = False
        self.returns_two = False
        self.rate: Any = 1.0
        self.double()

    cool = 1.0  # of the class, too

    def forward(self, x: Tensor) -> Any:
        """(samples, 6) -> (samples, 3)."""
        first = x = torch.tanh(self.first(x))
        if not self.skips:
            x = torch.tanh(self.second(x))
        if self.norms:
            x = self.norm(x)
        if self.is_turned:
            x = torch.relu(x) + torch.tanh(x)
        rate = self.rate * (2.0 if isinstance(self.rate, Tensor) else 1.0)
        x = torch.tanh(self.third(x) * rate * self.cool)
        if self.is_tied:
            x = x @ self.second.weight
        x = self.head(x + first if self.crosses else x)
        return (x, x.exp()) if self.returns_two else x


# What the loop sets before a step: for some steps, then back.
CHANGES: Final[dict[str, dict[int, dict[str, bool | float]]]] = {
    "a layer left out": {2: {"skips": True}, 4: {"skips": False}},
    "a norm comes in": {2: {"norms": True}},
    "other calls without weights": {1: {"is_turned": True}, 3: {"is_turned": False}},
    "another output": {1: {"returns_two": True}, 4: {"returns_two": False}},
    "a tied weight left out": {-1: {"is_tied": True}, 2: {"is_tied": False}},
    "a number of whose type the code asks": {
        1: {"rate": 0.5},
        3: {"rate": 0.25},
        4: {"rate": 2.0},
    },
    "a number of the class": {1: {"cool": 0.5}, 3: {"cool": 0.25, "skips": True}},
    "two at once": {2: {"skips": True, "norms": True}},
}


def loss(output: Any, targets: Tensor) -> Tensor:
    """A mean of squares, or of two."""
    if isinstance(output, tuple):
        return loss(output[0], targets) + loss(output[1], targets)
    return ((output - targets) ** 2).mean()


def adam(weights: Any) -> torch.optim.Optimizer:
    """Moments and a decay show weights that should have been left alone."""
    return torch.optim.AdamW(weights, 0.02, weight_decay=0.1)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Eight samples each."""
    rng = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(8, 6, generator=rng, dtype=torch.float64),
            torch.randn(8, 3, generator=rng, dtype=torch.float64),
        )
        for _ in range(NUM_STEPS)
    ]


def change(net: nn.Module, what: str, step: int) -> None:
    """Make the loop's changes before a step."""
    for name, value in CHANGES[what].get(step, {}).items():
        setattr(net, name, value)


def train_plain(
    net: nn.Module, what: str, parts: int, clip: float | None
) -> list[float]:
    """The plain loop, and what it evaluates to at the end."""
    change(net, what, -1)
    optimizer, losses = adam(net.parameters()), []
    for step, (x, y) in enumerate(batches()):
        change(net, what, step)
        optimizer.zero_grad()
        total = 0.0
        for one, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
            part = loss(net(one), target) / parts
            part.backward()
            total += part.item()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        losses.append(total)
    with torch.no_grad():
        losses.append(loss(net.eval()(batches()[0][0]), batches()[0][1]).item())
    return losses


def entry_train(what: str, way: str) -> dict[str, Any]:
    """Train two workers' stages; evaluate."""
    net = Branches()
    change(net, what, -1)
    if way == "shards":
        net.norm.eval()
    data = batches()
    options = {"num_microbatches": 2, "cut": ["third"]}
    with started(net, loss, adam, data[0], **{**options, **WAYS[way]}) as pipeline:
        losses = []
        for step, batch in enumerate(data):
            change(net, what, step)
            losses.append(pipeline.step(batch).loss)
        losses.append(pipeline.evaluate([data[0]]).loss)
        weights = pipeline.state_dict()
    return {
        "losses": losses,
        "weights": {name: x.flatten().tolist() for name, x in weights.items()},
    }


CASES: Final = [
    *((what, way) for what in CHANGES for way in ("1f1b", "split backwards")),
    ("a layer left out", "recomputed"),
    ("other calls without weights", "interleaved"),
    ("a layer left out", "shards"),
]


@pytest.mark.parametrize(("what", "way"), CASES)
def test_two_workers_train_as_the_plain_loop(
    what: str, way: str, tmp_path: Path
) -> None:
    """Losses, weights, statistics and evaluation."""
    answers = answers_of(f"{__name__}:entry_train", what, way, folder=tmp_path)
    net = Branches()
    if way == "shards":
        net.norm.eval()
    clip = WAYS[way].get("clip_norm")
    losses = train_plain(net, what, 4 if way == "shards" else 2, clip)
    for answer in answers:
        assert answer["losses"] == pytest.approx(losses, rel=1e-10)
        for name, x in net.state_dict().items():
            known = x.flatten().tolist()
            assert answer["weights"][name] == pytest.approx(known, rel=1e-10, abs=1e-12)


class Drops(Branches):
    """Draws in two layers."""

    def forward(self, x: Tensor) -> Tensor:
        """(samples, 6) -> (samples, 3)."""
        x = torch.tanh(self.first(x))
        if not self.skips:
            x = nn.functional.dropout(torch.tanh(self.second(x)))
        return self.head(nn.functional.dropout(torch.tanh(self.third(x))))


def entry_drop() -> list[float]:
    """Leave a layer out under way."""
    net, data = Drops(), batches()
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    cut = None if is_alone else ["third"]
    with started(net, loss, adam, data[0], cut=cut) as pipeline:
        losses = []
        for step, batch in enumerate(data):
            change(net, "a layer left out", step)
            losses.append(pipeline.step(batch).loss)
    return losses


def test_what_is_drawn_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    """Layers keep the seeds that they had before."""
    losses = entry_drop()
    for answer in answers_of(f"{__name__}:entry_drop", folder=tmp_path):
        assert answer == pytest.approx(losses, rel=1e-10)


REFUSED: Final[dict[str, tuple[str, str]]] = {
    "is_tied": ("stage 1 would compute with second.weight", "third"),
    "crosses": ("between which other tensors cross", "third"),
    "skips": ("cannot be cut before second", "second"),
}


def entry_refused(name: str) -> str:
    """Change something under way."""
    net, data = Branches(), batches()
    cut = [REFUSED[name][1]]
    try:
        with started(net, loss, adam, data[0], cut=cut) as pipeline:
            pipeline.step(data[0])
            setattr(net, name, True)
            pipeline.step(data[1])
    except HocketError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_cut_does_not_allow_is_named(name: str, tmp_path: Path) -> None:
    """Weights and messages stay where they are."""
    for answer in answers_of(f"{__name__}:entry_refused", name, folder=tmp_path):
        assert f"{name} was False and is True" in answer
        assert REFUSED[name][0] in answer
