"""Files of weights, and how they fit a model, or what is said when they do not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hocket.errors import ModelError
from hocket.model.trace.state import State
from hocket.model.weights.given import GivenWeights
from hocket.model.weights.stored import open_folder

INDEX = "model.safetensors.index.json"


class Net(nn.Module):
    """Two layers of one weight, a norm with buffers, and a table that is not saved."""

    def __init__(self, kind: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.to(kind)


class Extra(nn.Linear):
    """A layer with an extra state."""

    def get_extra_state(self) -> Any:
        """One that no such file has."""
        return {"scale": 1.0}

    def set_extra_state(self, state: Any) -> None:
        """Take it."""


def saved() -> dict[str, Tensor]:
    """A net's tensors, a tied one once, as libraries save them."""
    torch.manual_seed(1)
    state = {k: x.contiguous() for k, x in Net().state_dict().items()}
    del state["last.weight"]
    return state


def given(path: Path, make: Callable[[], nn.Module] = Net) -> dict[str, Tensor]:
    """All tensors of a model on meta that is given these files."""
    with torch.device("meta"):
        model = make()
    GivenWeights(model, open_folder(path)).hold(State.of(model).tensors)
    return {k: x.detach() for k, x in model.state_dict().items()}


def write(folder: Path, tensors: dict[str, Tensor], **files: list[str]) -> Path:
    """Write one file, or several with an index; return the folder."""
    if not files:
        save_file(tensors, folder / "model.safetensors")
        return folder
    places = {
        name: f"{file}.safetensors" for file, own in files.items() for name in own
    }
    for file, names in files.items():
        save_file({x: tensors[x] for x in names}, folder / f"{file}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return folder


def test_a_file_and_a_folder_of_several_are_read(tmp_path: Path) -> None:
    """Under all names of a tied weight; buffers, too."""
    tensors = saved()
    names = sorted(tensors)
    folder = write(tmp_path, tensors, a=names[::2], b=names[1::2])
    (tmp_path / "one").mkdir()
    one = write(tmp_path / "one", tensors) / "model.safetensors"
    for path in (folder, one, one.parent):
        found = given(path)
        assert torch.equal(found.pop("last.weight"), tensors["first.weight"])
        assert found.keys() == tensors.keys()
        assert all(torch.equal(x, tensors[k]) for k, x in found.items())


def test_values_are_converted_as_torch_loads_them(tmp_path: Path) -> None:
    """Half precision into single, and back."""
    tensors = {
        k: x.bfloat16() if x.is_floating_point() else x for k, x in saved().items()
    }
    write(tmp_path, tensors)
    assert torch.equal(given(tmp_path)["first.bias"], tensors["first.bias"].float())
    write(tmp_path, saved())
    halved = given(tmp_path, lambda: Net(torch.bfloat16))
    assert torch.equal(halved["first.bias"], saved()["first.bias"].bfloat16())


def test_only_what_is_held_is_read(tmp_path: Path) -> None:
    """And taken back, when something else is."""
    with torch.device("meta"):
        model = Net()
    weights = GivenWeights(model, open_folder(write(tmp_path, saved())))
    weights.hold(["norm.weight"])
    assert torch.equal(model.norm.weight, saved()["norm.weight"])
    assert model.first.weight.abs().sum() == 0
    weights.hold(["first.weight"])
    assert torch.equal(model.last.weight, saved()["first.weight"])


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Another name for one tensor."""
    return lambda x: {new if k == old else k: v for k, v in x.items()}


def changed(
    name: str, value: Tensor
) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Another tensor."""
    return lambda x: {**x, name: value}


WRONG: list[tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = [
    (
        renamed("norm.bias", "norm.beta"),
        "it has no norm.bias; did you mean 'norm.beta'?",
    ),
    (changed("head.bias", torch.ones(4)), "it has head.bias, which is no name of the"),
    (
        changed("first.bias", torch.ones(5)),
        "first.bias has the shape (5,) there, and (4,) in the model",
    ),
    (
        changed("first.bias", torch.ones(4).to(torch.float8_e4m3fn)),
        "first.bias is float8_e4m3fn there, which has a scale of its own",
    ),
    (
        changed("first.bias", torch.ones(4, dtype=torch.complex64)),
        "first.bias is complex64 there, and float32 in the model, which would lose",
    ),
    (
        changed("first.bias", torch.ones(4, dtype=torch.int8)),
        "first.bias is int8 there (quantized?), and float32 in the model",
    ),
    (
        changed("last.weight", torch.ones(4, 4)),
        "has two values of one weight: in this model first.weight and last.weight are",
    ),
    (
        lambda x: {f"model.{k}": v for k, v in x.items()},
        "all names there begin with 'model.', and those in the model do not",
    ),
]


@pytest.mark.parametrize(("change", "why"), WRONG)
def test_what_does_not_fit_is_named(
    tmp_path: Path, change: Callable[[Any], Any], why: str
) -> None:
    """Names with the nearest ones, both shapes, both types; and nothing is read."""
    write(tmp_path, change(saved()))
    with pytest.raises(ModelError, match=re.escape(why)) as caught:
        given(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_prefix_of_the_models_names_is_named(tmp_path: Path) -> None:
    """Where the files are of a part of it."""
    write(tmp_path, saved())
    with pytest.raises(ModelError, match=r"in the model begin with 'net\.', and those"):
        given(tmp_path, lambda: nn.ModuleDict({"net": Net()}))


def test_an_extra_state_is_in_no_such_file(tmp_path: Path) -> None:
    """It would stay what the constructor has set."""
    write(tmp_path, {"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    with pytest.raises(ModelError, match="has no _extra_state: an extra state"):
        given(tmp_path, lambda: Extra(2, 2))


def test_hooks_of_loading_are_refused(tmp_path: Path) -> None:
    """They would be called with a whole state dict."""

    def hooked() -> nn.Module:
        net = Net()
        net.norm.register_load_state_dict_post_hook(lambda module, keys: None)
        return net

    write(tmp_path, saved())
    with pytest.raises(ModelError, match="norm has a hook of load_state_dict"):
        given(tmp_path, hooked)


def half(folder: Path) -> None:
    """Leave one of two files away."""
    names = sorted(saved())
    write(folder, saved(), a=names[::2], b=names[1::2])
    (folder / "b.safetensors").unlink()


def short(folder: Path) -> None:
    """Cut a file off."""
    path = write(folder, saved()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def twice(folder: Path) -> None:
    """The same names in two files, and no index."""
    write(folder, saved())
    save_file({"first.bias": torch.ones(4)}, folder / "other.safetensors")


def two_indexes(folder: Path) -> None:
    """One of each of two models."""
    write(folder, saved(), a=sorted(saved()))
    (folder / f"other.{INDEX}").write_text("{}")


def elsewhere(folder: Path) -> None:
    """An index that names a file outside of its folder."""
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))


def pickled(folder: Path) -> None:
    """What torch.save writes."""
    (folder / "pytorch_model.bin").write_bytes(b"")


def no_map(folder: Path) -> None:
    """An index of something else."""
    (folder / INDEX).write_text("[]")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (half, "lists 2 files, of which 1 are not there, such as b.safetensors"),
        (short, "model.safetensors cannot be read"),
        (twice, "has first.bias twice: in model.safetensors and in other.safetensors"),
        (two_indexes, "has several indexes"),
        (elsewhere, "says that x is in '../x.safetensors', no file beside it"),
        (pickled, "pytorch_model.bin is a pickle, which could run code"),
        (no_map, "is no index of safetensors"),
        (lambda _: None, "has no *.safetensors"),
    ],
)
def test_folders_that_cannot_be_read_are_named(
    tmp_path: Path, damage: Callable[[Path], None], why: str
) -> None:
    """With what is missing, and the way out."""
    damage(tmp_path)
    with pytest.raises(ModelError, match=re.escape(why)):
        given(tmp_path)
    with pytest.raises(ModelError, match="is neither a file nor a folder here"):
        open_folder(tmp_path / "nothing")
