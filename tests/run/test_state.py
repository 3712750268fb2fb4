"""What a model's modules save, and the whole model on every worker."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import hocket
from hocket.run.checkpoint.export import WeightFormat, export
from tests.run.support.forked import answers_of
from tests.run.support.joined import reported
from tests.run.support.plainly import SGD, train_plainly
from tests.run.support.started import started

BATCHES = [(torch.randn(8, 6).double(), torch.randn(8, 6).double()) for _ in range(3)]


class Scaled(nn.Module):
    """A layer with an extra state, a buffer, and a hook that counts loads."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.extra: Any = {"scale": scale, "history": [torch.ones(2), (1, "a")]}
        self.num_loads = 0
        register: Any = self.register_load_state_dict_post_hook
        register(lambda module, _: module.count())

    def count(self) -> None:
        """Count a load."""
        self.num_loads += 1

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        return self.norm(self.linear(x))

    def get_extra_state(self) -> Any:
        """What the loop has put there."""
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        """Take it."""
        self.extra = state


class Tied(nn.Module):
    """Two such layers, and a weight that both ends share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.two = nn.Linear(6, 6), Scaled(1.0), Scaled(2.0)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        return self.last(self.two(torch.tanh(self.one(self.first(x)))))


def model_of(kind: str) -> nn.Module:
    """Captured with tied weights, or a Sequential whose children run as they are."""
    torch.manual_seed(0)
    model = Tied() if kind == "captured" else nn.Sequential(Scaled(1.0), Scaled(2.0))
    return model.double()


def pipeline_of(model: nn.Module, **more: Any) -> hocket.Pipeline:
    """Of one microbatch, so that BatchNorm sees what the plain loop's does."""
    return started(
        model, nn.functional.mse_loss, SGD, BATCHES[0], num_microbatches=1, **more
    )


def trained_plainly(kind: str) -> nn.Module:
    """The plain loop."""
    model = model_of(kind)
    train_plainly(model, nn.functional.mse_loss, SGD, BATCHES)
    return model


def is_tied(model: nn.Module) -> bool:
    """Whether it still shares its weight."""
    return not isinstance(model, Tied) or model.first.weight is model.last.weight


def scaled_of(model: nn.Module) -> list[Scaled]:
    """Its two layers."""
    return [x for x in model.modules() if isinstance(x, Scaled)]


def difference(state: Any, other: Any) -> float:
    """The largest difference of two state dicts with the same names."""
    assert list(state) == list(other)
    pairs = [(x, other[k]) for k, x in state.items() if isinstance(x, Tensor)]
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def gather(_folder: str, kind: str) -> dict[str, Any]:
    """Train and gather into the user's own model, a new one, and averages elsewhere."""
    model, plain = model_of(kind), trained_plainly(kind)
    with pipeline_of(model, ema_decay=0.5) as pipeline:
        for batch in BATCHES:
            pipeline.step(batch)
        scaled_of(model)[0].extra = {"scale": 7.0, "history": []}
        scaled_of(plain)[0].extra = {"scale": 7.0, "history": []}
        fresh, averaged = model_of(kind), model_of(kind)
        for target in (model, fresh):
            pipeline.gather_into(target)
        pipeline.gather_into(averaged, ema=True)
        found = {
            "own": difference(model.state_dict(), plain.state_dict()),
            "fresh": difference(fresh.state_dict(), plain.state_dict()),
            "state_dict": difference(pipeline.state_dict(), plain.state_dict()),
            "averaged": difference(averaged.state_dict(), plain.state_dict()),
            "tied": not isinstance(model, Tied)
            or model.first.weight is model.last.weight,
            "extra": [x.extra["scale"] for x in scaled_of(fresh)],
            "history": str(scaled_of(fresh)[1].extra["history"]),
            "errors": [
                reported(lambda: pipeline.gather_into(model, ema=True)),
                reported(lambda: pipeline.gather_into(nn.Linear(6, 6))),
            ],
        }
        pipeline.step(BATCHES[0])
    return found


def save_and_load(folder: str, kind: str) -> dict[str, Any]:
    """Extra state in checkpoints, and in what is exported and read by torch."""
    path = Path(folder)
    model = model_of(kind)
    with pipeline_of(model) as pipeline:
        pipeline.step(BATCHES[0])
        for scaled, number in zip(scaled_of(model), (5.0, 6.0), strict=True):
            scaled.extra = {"scale": number, "history": [torch.full((2,), number)]}
        pipeline.save(path / "run")
        state = pipeline.state_dict()
        is_main = pipeline.is_main
        if is_main:
            for form in (WeightFormat.TORCH, WeightFormat.DISTRIBUTED):
                export(path / "run", path / f"weights.{form.value}", form)
        pipeline.world.barrier("written")
    found: dict[str, Any] = {"is_main": is_main}
    for name in ("run", "weights.pt", "weights.dcp"):
        other = model_of(kind)
        if name != "run":
            load_plain(other, path / name)
        with pipeline_of(other) as pipeline:
            if name == "run":
                pipeline.load(path / name)
            loaded = pipeline.state_dict()
            found[name] = [
                difference(loaded, state),
                str([x.extra for x in scaled_of(other)]),
                [x.num_loads for x in scaled_of(other)],
            ]
    found["safetensors"] = reported(lambda: export(path / "run", path / "no.st"))
    return found


def load_plain(model: nn.Module, source: Path) -> None:
    """Load what was exported as a plain loop does: DCP fills values that are there."""
    for scaled in scaled_of(model):
        scaled.extra = {"scale": 0.0, "history": [torch.zeros(2)]}
    state = model.state_dict()
    if source.is_file():
        state = torch.load(source, weights_only=True)
    else:
        dcp.load(state, checkpoint_id=source, no_dist=True)
    model.load_state_dict(state)


class Rotated(nn.Module):
    """A layer with a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex128))
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        return self.linear((x.to(self.weight.dtype) @ self.weight).abs())


def train_complex(folder: str) -> dict[str, Any]:
    """Clip, save and load complex weights."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Rotated(), Rotated())

    plain = made()
    train_plainly(plain, nn.functional.mse_loss, SGD, BATCHES, clip_norm=0.1)
    with pipeline_of(made(), clip_norm=0.1) as pipeline:
        for batch in BATCHES:
            pipeline.step(batch)
        state = pipeline.state_dict()
        pipeline.save(folder)
        target = Path(folder) / "no.safetensors"
        is_main = pipeline.is_main
        error = reported(lambda: export(folder, target)) if is_main else []
    with pipeline_of(made(), clip_norm=0.1) as pipeline:
        pipeline.load(folder)
        loaded = pipeline.state_dict()
    return {
        "trained": complex_difference(state, plain.state_dict()),
        "loaded": complex_difference(loaded, state),
        "is_main": is_main,
        "safetensors": error,
    }


def complex_difference(state: Any, other: Any) -> float:
    """The largest difference."""
    return max(float((x - other[name]).abs().max()) for name, x in state.items())


def refuse(_folder: str) -> list[list[str]]:
    """What an extra state cannot be, and what else a module may not save."""

    class Saving(nn.Linear):
        def _save_to_state_dict(self, destination: Any, *args: Any, **more: Any) -> Any:
            super()._save_to_state_dict(destination, *args, **more)
            destination["0.linear.more"] = 3

    found = []
    for extra in (io.BytesIO(), {"of": {1, 2}}, torch.zeros(2**20).double()):
        model = model_of("sequential")
        scaled_of(model)[0].extra = extra
        found.append(reported(partial(pipeline_of, model)))
    model = model_of("sequential")
    scaled_of(model)[0].linear = Saving(6, 6).double()
    found.append(reported(lambda: pipeline_of(model)))
    return found


def hooked(_folder: str, kind: str) -> dict[str, Any]:
    """Hooks of the state dict see and change what they would in torch."""
    model, plain = model_of(kind), trained_plainly(kind)

    def rename(module: Any, state: Any, prefix: str, _: Any) -> None:
        state[f"{prefix}renamed"] = state.pop(f"{prefix}linear.bias")

    def note(module: Any, prefix: str, keep_vars: bool) -> None:
        module.extra = {"scale": f"noted {prefix}", "history": []}

    for one in (model, plain):
        first, second = scaled_of(one)
        register: Any = first.register_state_dict_pre_hook
        register(note)
        register = second._register_state_dict_hook
        register(rename)
    with pipeline_of(model) as pipeline:
        for batch in BATCHES:
            pipeline.step(batch)
        state, expected = pipeline.state_dict(), plain.state_dict()
    assert {*state} == {*expected}
    ordered = {name: state[name] for name in expected}
    notes = [x["scale"] for k, x in state.items() if k.endswith("_extra_state")]
    return {"difference": difference(ordered, expected), "notes": notes}


WORKERS: Final = __name__
TOLERANCE: Final = 1e-10
WAYS: Final = [(kind, num) for kind in ("captured", "sequential") for num in (1, 2)]

pytestmark = pytest.mark.timeout(120)


def answers(name: str, folder: Path, num_workers: int, *args: Any) -> Any:
    """What each worker found."""
    return answers_of(
        f"{WORKERS}:{name}", str(folder), *args, num_workers=num_workers, folder=folder
    )


@pytest.mark.parametrize(("kind", "num_workers"), WAYS)
def test_the_whole_model_is_gathered_in_place(
    tmp_path: Path, kind: str, num_workers: int
) -> None:
    """After training on several workers, the user's own model was trained in part.

    Weights, a tied one, statistics and extra state are the plain loop's on every
    worker. Averages go into another model, never into the one that is trained.
    """
    for found in answers("gather", tmp_path, num_workers, kind):
        for what in ("own", "fresh", "state_dict"):
            assert found[what] <= TOLERANCE, what
        assert found["averaged"] > 1e-3
        assert found["tied"]
        assert found["extra"] == [7.0, 2.0]
        assert found["history"] == "[tensor([1., 1.]), (1, 'a')]"
        averages, names = found["errors"]
        assert averages[0] == "ConfigError"
        assert averages[1].startswith("gather_into(ema=True) would replace the weights")
        assert names[0] == "ModelError"
        assert "Missing key(s) in state_dict" in names[1]


@pytest.mark.parametrize(("kind", "num_workers"), WAYS)
def test_extra_state_is_saved_and_loaded(
    tmp_path: Path, kind: str, num_workers: int
) -> None:
    """A module with `get_extra_state` ended `state_dict()` with a KeyError.

    It comes back from checkpoints, and from files of torch and of DCP; hooks behind a
    load are called.
    """
    for found in answers("save_and_load", tmp_path, num_workers, kind):
        expected = (
            str(
                [
                    {"scale": n, "history": [f"tensor([{n:.0f}., {n:.0f}.])"]}
                    for n in (5.0, 6.0)
                ]
            )
            .replace('"', "")
            .replace("['t", "[t")
            .replace(")']", ")]")
        )
        for name in ("run", "weights.pt", "weights.dcp"):
            difference, extra, num_loads = found[name]
            assert difference == 0.0
            assert extra == expected
            assert num_loads == [1, 1]
        if found["is_main"]:
            assert found["safetensors"][0] == "CheckpointError"
            assert "safetensors hold neither extra state" in found["safetensors"][1]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_complex_weights_are_clipped_and_saved(
    tmp_path: Path, num_workers: int
) -> None:
    """torch clamps no complex number, and safetensors have no name for complex128.

    Both ended in an error after training.
    """
    for found in answers("train_complex", tmp_path, num_workers):
        assert found["trained"] <= TOLERANCE
        assert found["loaded"] == 0.0
        if found["is_main"]:
            assert "complex128: export as pt or dcp" in found["safetensors"][1]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_cannot_be_saved_is_refused_by_name(
    tmp_path: Path, num_workers: int
) -> None:
    """When the pipeline is made, and not after training."""
    for file, some, large, more in answers("refuse", tmp_path, num_workers):
        for error in (file, some, large, more):
            assert error[0] == "ModelError"
        assert file[1].startswith("0._extra_state is a _io.BytesIO")
        assert some[1].startswith("0._extra_state/of is a builtins.set")
        assert "keep large tensors in buffers" in large[1]
        assert more[1].startswith("0.linear (Saving) saves 0.linear.more")


@pytest.mark.parametrize(("kind", "num_workers"), WAYS)
def test_hooks_of_the_state_dict_are_called(
    tmp_path: Path, kind: str, num_workers: int
) -> None:
    """One that renames, and one that comes before."""
    for found in answers("hooked", tmp_path, num_workers, kind):
        assert found["difference"] <= TOLERANCE
        assert found["notes"][0].startswith("noted ")
        assert found["notes"][1] == 2.0
