"""Of the uncut model a worker keeps its own stages, and the user what they refer to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hocket.run.cluster.world import join_world
from tests.run.support.forked import run_forked
from tests.run.support.plainly import train_plainly
from tests.run.support.started import started

MODULE: Final = "tests.run.stage.test_uncut"
WIDTH: Final = 8
ADAMW: Final = partial(torch.optim.AdamW, lr=1e-3)


class Tied(nn.Module):
    """Words in and words out by one weight, with code of its own between layers."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.head = nn.Linear(WIDTH, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        """Score each word."""
        x = self.embed(words)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale
        score: Tensor = self.head(x)
        return score


class Curious(nn.Module):
    """Looks at its data, so that it must be run as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Not of what is no number."""
        y: Tensor = self.linear(x)
        return y if x.isfinite().all().item() else x


class HandsOn(nn.Module):
    """Curious submodules, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Curious()
        self.second = Curious()

    def forward(self, x: Tensor) -> Tensor:
        """Both."""
        y: Tensor = self.second(self.first(x))
        return y


def _chain() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


MODELS: Final[dict[str, Callable[[], nn.Module]]] = {
    "as it is": _chain,
    "exported": Tied,
    "submodules": HandsOn,
}
CUTS: Final = {"as it is": "3", "exported": "layers.2", "submodules": "second"}


def batch_of(kind: str) -> tuple[Tensor, Tensor]:
    """The same on every worker."""
    generator = torch.Generator().manual_seed(1)
    if kind == "exported":
        words = torch.randint(12, (8, 5), generator=generator)
        return words, words
    return torch.randn(8, WIDTH, generator=generator), torch.zeros(8, WIDTH)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """A mean over samples."""
    if targets.dtype == torch.int64:
        return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())
    return nn.functional.mse_loss(output, targets)


def train(kind: str, folder: str, is_kept: bool) -> dict[str, Any]:
    """Train, evaluate, save and load, and see what is in memory; a worker's entry."""
    torch.set_num_threads(1)
    memory: dict[str, StorageWeakRef] = {}
    kept: list[nn.Module] = []

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = MODELS[kind]()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            memory[name] = StorageWeakRef(tensor.untyped_storage())
        if is_kept:
            kept.append(model)
        return model

    batch = batch_of(kind)
    with started(
        make(), loss, ADAMW, batch, cut=[CUTS[kind]], world=join_world()
    ) as pipeline:
        first = pipeline.step(batch).loss
        pipeline.evaluate([batch])
        alive = [name for name, one in memory.items() if not one.expired()]
        own = {
            name
            for runner in pipeline._executor.runners.values()
            for module in [runner.module]
            for name, _ in (*module.named_parameters(), *module.named_buffers())
        }
        pipeline.save(folder)
        state = pipeline.state_dict()
        second = pipeline.step(batch).loss
        pipeline.load(folder)
        again = pipeline.step(batch).loss
        del kept[:]
    return {
        "alive": sorted(alive),
        "own": sorted(own),
        "all": sorted(memory),
        "state": {name: float(x.sum()) for name, x in state.items()},
        "losses": [first, second, again],
    }


def plain(kind: str) -> tuple[float, dict[str, Tensor]]:
    """The loss before, and the state after one step of the plain loop."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    (value,) = train_plainly(model, loss, ADAMW, [batch_of(kind)])
    return value, model.state_dict()


@pytest.mark.timeout(110)
@pytest.mark.parametrize("kind", MODELS)
def test_other_stages_weights_are_freed(kind: str, tmp_path: Path) -> None:
    """They stayed in every worker's memory; and all works as well without them."""
    folder = str(tmp_path / "saved")
    done = run_forked(
        f"{MODULE}:train", kind, folder, False, folder=tmp_path, timeout_s=30
    )
    assert set(done.codes.values()) == {0}, done.output
    value, state = plain(kind)
    for result in done.results.values():
        assert result["alive"] == result["own"] != result["all"]
        assert result["losses"][0] == pytest.approx(value, rel=1e-5)
        assert result["losses"][1] == result["losses"][2]
        assert list(result["state"]) == list(state)
        for name, tensor in state.items():
            assert result["state"][name] == pytest.approx(
                float(tensor.sum()), rel=1e-4, abs=1e-4
            )
    one, other = done.results.values()
    assert sorted({*one["own"], *other["own"]}) == one["all"]


@pytest.mark.timeout(110)
def test_what_the_user_refers_to_stays(tmp_path: Path) -> None:
    """Their model is theirs: nothing in it is emptied behind their back."""
    done = run_forked(
        f"{MODULE}:train",
        "exported",
        str(tmp_path / "saved"),
        True,
        folder=tmp_path,
        timeout_s=30,
    )
    assert set(done.codes.values()) == {0}, done.output
    for result in done.results.values():
        assert result["alive"] == result["all"] != result["own"]
