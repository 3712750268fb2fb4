"""A net on one worker: an outline without values, and what its stages use alone."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hocket.errors import ModelError
from hocket.model.capture.capture import capture
from hocket.run.nets.net import NetOnWorker

KINDS = ("sequential", "export", "submodules")


class Block(nn.Module):
    """A linear layer with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        """From x_BW to x_BW."""
        return torch.tanh(self.norm(self.linear(x)))


def make_net(how: Any) -> tuple[NetOnWorker, dict[str, weakref.ref[Tensor]], Any]:
    """Five blocks, of which the first and the last share a weight.

    Returns:
        The net, its tensors, and a batch with the model's output.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(5))).double()
    first, last = model[0], model[4]
    assert isinstance(first, Block)
    assert isinstance(last, Block)
    last.linear.weight = first.linear.weight
    x = torch.randn(6, 4, dtype=torch.float64)
    captured = capture(model, (x,), capture=how, cut=["1", "2", "3", "4"])
    alive = {name: weakref.ref(x) for name, x in captured.state.tensors.items()}
    net = NetOnWorker("model", captured)
    with torch.no_grad():  # a graph would keep all weights
        return net, alive, (x, model.eval()(x))


def names_alive(alive: dict[str, weakref.ref[Tensor]]) -> set[str]:
    """Whose tensors are in memory."""
    gc.collect()
    return {name for name, ref in alive.items() if ref() is not None}


@pytest.mark.parametrize("how", KINDS)
def test_only_what_a_stage_uses_stays_in_memory(how: str) -> None:
    """The capture and the model are gone with the test's own hold on them."""
    net, alive, _ = make_net(how)
    names = net.names((1, 3))
    assert names_alive(alive) == set(alive)

    net.cut((1, 3), here=[1])
    assert names_alive(alive) == names[1]
    assert names[1] == {n for n in alive if n.startswith(("1.", "2."))}
    net.cut((1, 2), here=[1])
    assert names_alive(alive) == {n for n in alive if n.startswith("1.")}
    assert list(net.state_dict()) == [n for n in alive if n.startswith("1.")]


@pytest.mark.parametrize("how", KINDS)
def test_cut_again_it_computes_the_same_on_the_same_parameters(how: str) -> None:
    """At every boundary, with all stages here; a tied weight is one object."""
    net, alive, (inputs, expected) = make_net(how)
    for boundaries in ((2,), (1, 2, 3, 4), (), (1, 4)):
        stages = net.cut(boundaries, here=range(len(boundaries) + 1))
        values: Any = ()
        for stage in stages:
            stage.eval()
            values = stage(*values, *(inputs for _ in stage.batch_inputs))
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=0)
        assert all(alive[name]() is x for name, x in net.tensors.items())
    assert {"0.linear.weight", "4.linear.weight"} <= net.state_dict().keys()


def test_what_is_not_here_must_be_received() -> None:
    """A cut that needs it says so, and takes it when it came."""
    net, _, _ = make_net("sequential")
    whole = net.tensors
    net.cut((2,), here=[0])
    with pytest.raises(ModelError, match=r"stages 0 of net model use 2\.linear\.bias"):
        net.cut((3,), here=[0])
    came = {name: x for name, x in whole.items() if name.startswith("2.")}
    net.cut((3,), here=[0], received=came)
    assert net.tensors["2.linear.bias"] is whole["2.linear.bias"]


def test_the_outline_has_no_values() -> None:
    """Names, shapes and types are the model's; bytes are counted without memory."""
    net, alive, _ = make_net("export")
    for name, x in net.outline.state.tensors.items():
        real = alive[name]()
        assert real is not None
        assert x.is_meta
        assert (x.shape, x.dtype) == (real.shape, real.dtype)
        assert net.num_bytes()["model", name] == real.nbytes
