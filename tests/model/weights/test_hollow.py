"""A model on meta gets memory that costs nothing before it is written."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hocket.errors import ConfigError
from hocket.model.weights.given import make_hollow

BIG = 4096  # squared, 64 MiB in float32


class Kept(nn.Module):
    """A layer that keeps a tensor of its own, neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        return self.linear(x) * self.scale


def on_meta(make: Any) -> Any:
    """Make a model on the meta device."""
    with torch.device("meta"):
        return make()


def anonymous_mb() -> int:
    """This process's anonymous memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(x for x in lines if x.startswith("RssAnon")).split()[1]) >> 10


def tied() -> Any:
    """Two layers with one weight."""
    model: Any = nn.Sequential(nn.Embedding(7, 3), nn.LSTM(3, 3), nn.Linear(3, 7))
    model[2].weight = model[0].weight
    return model


def test_parameters_stay_the_same_objects() -> None:
    """So do ties, what is frozen, and what a user has hung on them."""
    model: Any = on_meta(tied)
    before = [*model.parameters()]
    model[0].weight.requires_grad_(False)
    model[0].weight.kind = "table"
    make_hollow(model)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert model[2].weight is model[0].weight
    assert model[0].weight.kind == "table"
    assert not model[0].weight.requires_grad
    assert model[2].bias.requires_grad
    assert {str(x.device) for x in (*model.parameters(), *model.buffers())} == {"cpu"}
    output, _ = model[1](torch.zeros(2, 1, 3))  # torch kept weak references there
    assert output.abs().sum() == 0


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (3,), ()])
def test_strides_and_types_stay(shape: tuple[int, ...]) -> None:
    """Also those of a convolution's weights whose channels come last."""
    x = torch.empty(shape, device="meta", dtype=torch.bfloat16)
    model: Any = nn.Module()
    dense = x.to(memory_format=torch.channels_last) if len(shape) == 4 else x
    model.register_buffer("x", dense)
    make_hollow(model)
    assert model.x.stride() == dense.stride()
    assert model.x.dtype == torch.bfloat16
    assert model.x.shape == shape


@pytest.mark.parametrize(
    "kind",
    [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64],
)
def test_large_tensors_of_all_types_are_zero(kind: torch.dtype) -> None:
    """And zero again, when they were written and are released."""
    model: Any = nn.Module()
    model.register_buffer("x", torch.empty(300, 300, device="meta", dtype=kind))
    hollow = make_hollow(model)
    for _ in range(2):
        assert not model.x.view(torch.uint8).any()
        model.x.copy_(torch.ones(300, 300).to(kind))
        assert model.x.view(torch.uint8).any()
        hollow["x"].release()
    assert model.x.dtype == kind


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_memory_is_taken_by_what_is_written_and_given_back() -> None:
    """Reading takes none: whole layers run."""
    model = on_meta(lambda: nn.Sequential(nn.Linear(BIG, BIG), nn.Linear(BIG, BIG)))
    hollow = make_hollow(model)
    model(torch.zeros(1, BIG))
    before = anonymous_mb()
    with torch.no_grad():
        model(torch.zeros(1, BIG))
        assert anonymous_mb() - before < 16
        model[0].weight.fill_(1.0)
    assert anonymous_mb() - before > 48
    hollow["0.weight"].release()
    assert anonymous_mb() - before < 16
    assert model[0].weight.abs().sum() == 0


def test_what_would_be_lost_is_refused_by_name() -> None:
    """Hooks, and tensors that no file can have."""
    model = on_meta(lambda: nn.Linear(2, 2))
    model.bias.register_hook(lambda grad: grad)
    with pytest.raises(ConfigError, match="bias is on the meta device and has hooks"):
        make_hollow(model)
    held = on_meta(lambda: nn.Linear(2, 2))
    reference = weakref.ref(held.weight)
    with pytest.raises(ConfigError, match="weight cannot be given values: Cannot swap"):
        make_hollow(held)
    assert reference() is held.weight
    with pytest.raises(ConfigError, match=r"model\.scale is a tensor on the meta"):
        make_hollow(on_meta(Kept))
    other = on_meta(lambda: nn.Linear(2, 2))
    other.weight.register_post_accumulate_grad_hook(lambda x: None)
    with pytest.raises(ConfigError, match="weight is on the meta device and has hooks"):
        make_hollow(other)


def test_what_has_values_stays_as_it_is() -> None:
    """A model may be partly on meta."""
    model: Any = nn.Sequential(nn.Linear(2, 2), on_meta(lambda: nn.Linear(2, 2)))
    before = model[0].weight.clone()
    assert sorted(make_hollow(model)) == ["1.bias", "1.weight"]
    assert torch.equal(model[0].weight, before)
