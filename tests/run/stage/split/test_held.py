"""Between I and W, a layer's input and output gradient are held, and nothing else."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hocket.model.profile.allocations import allocations
from hocket.model.stages.splitter import Remainder
from hocket.run.stage.split.by_layers import ByLayers
from tests.run.stage.split.halves import How, halves, stage_of
from tests.run.stage.split.layers import LAYERS

CPU = torch.device("cpu")
NUM, IN, MIDDLE, OUT = 64, 16, 32, 8
ITEM_BYTES = 4

# Numbers in what the operator read, where that is not the layer's input.
PADDED = {
    "conv1d, same": 2 * 4 * (9 + 1),
    "conv2d, same, even": 2 * 4 * (9 + 1) * (7 + 1),
    "conv2d, circular": 2 * 4 * (9 + 2) * (7 + 2),
    "conv2d, reflect": 2 * 4 * (9 + 2) * (7 + 2),
    "conv2d, replicate": 2 * 4 * (9 + 2) * (7 + 2),
    "bilinear": 2 * 3 * 4 * 5,
    "bilinear, no bias": 2 * 6 * 5,
}


class Net(nn.Module):
    """Two linear layers, and between them what keeps activations of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, MIDDLE)
        self.norm = nn.LayerNorm(MIDDLE)
        self.second = nn.Linear(MIDDLE, OUT)

    def forward(self, x: Tensor) -> Tensor:
        middle = torch.tanh(self.norm(F.gelu(self.first(x))))
        found: Tensor = self.second(middle)
        return found


@pytest.mark.parametrize("how", ["export", "sequential"])
def test_by_the_allocator(how: How) -> None:
    """What I leaves behind, and that W gives it back."""
    x = torch.randn(NUM, IN, requires_grad=True)
    stage = stage_of(Net(), (x,), how)
    splitter = ByLayers(stage)
    dy = torch.randn(NUM, OUT)
    with allocations(CPU) as log:
        with log.span():
            with splitter.on():
                out = splitter.module(x)
            edge = get_gradient_edge(out)
            del out
            (dx,), left = splitter.input_gradients([edge], [dy], [x])
            del edge
        held_bytes = left.num_bytes
        with log.span():
            left.finish()

    inputs_and_grads = NUM * (IN + MIDDLE) + NUM * (MIDDLE + OUT)
    assert held_bytes == inputs_and_grads * ITEM_BYTES
    from_outside = x.nbytes + dy.nbytes
    norm = 2 * MIDDLE * ITEM_BYTES
    assert dx is not None
    assert log.left[0] == held_bytes - from_outside + dx.nbytes + norm
    weights = sum(p.nbytes for p in stage.parameters()) - norm
    assert log.left[1] == weights - (held_bytes - from_outside)
    assert left.num_bytes == 0


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's, once
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_holds_its_input_and_its_outputs_gradient(name: str) -> None:
    """Where the input is padded first, or folded, what the operator read."""
    layer = LAYERS[name]
    inputs = layer.inputs(wants_grad=True, dtype=torch.float32)
    left_over: list[Remainder] = []
    held: list[int] = []

    def watch(_: nn.Module, left: Remainder) -> None:
        left_over.append(left)
        held.append(left.num_bytes)

    model = layer.make()
    output = model(*inputs)
    halves(model, inputs, "sequential", between=watch)

    read = PADDED.get(name, sum(x.numel() for x in inputs))
    itemsize = inputs[0].element_size()
    assert held == [read * itemsize + output.numel() * ITEM_BYTES]
    assert [left.num_bytes for left in left_over] == [0]


def test_w_gives_back_one_layer_after_the_other() -> None:
    """When it computes a layer's gradient, those before it hold nothing any more."""
    x = torch.randn(NUM, IN, requires_grad=True)
    left_over: list[int] = []

    def watch(stage: nn.Module, left: Remainder) -> None:
        whole = left.num_bytes
        for parameter in stage.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _: left_over.append(whole - left.num_bytes)
            )

    halves(Net(), (x,), "export", between=watch)

    second, first = NUM * (MIDDLE + OUT), NUM * (IN + MIDDLE)
    assert left_over[:2] == [second * ITEM_BYTES] * 2
    assert left_over[2:] == [(second + first) * ITEM_BYTES] * 2


def test_a_shared_block_counts_once() -> None:
    """Three layers that read the same input hold it one time."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(IN, OUT) for _ in "qkv")

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([layer(x) for layer in self.layers]).prod(0)

    found: list[int] = []
    x = torch.randn(NUM, IN, requires_grad=True)
    halves(
        Three(), (x,), "export", between=lambda _, left: found.append(left.num_bytes)
    )

    assert found == [NUM * (IN + 3 * OUT) * ITEM_BYTES]


def test_under_autocast_the_short_input_is_held() -> None:
    """And the long one is gone."""
    x = torch.randn(NUM, IN, requires_grad=True)
    found: list[int] = []
    halves(
        Net(),
        (x,),
        "export",
        torch.autocast("cpu", torch.bfloat16),
        between=lambda _, left: found.append(left.num_bytes),
    )

    numbers = NUM * (IN + MIDDLE) + NUM * (MIDDLE + OUT)
    assert found == [numbers * 2]


def test_nothing_is_left_in_a_cycle() -> None:
    """A forward without a backward is given back at once, without a collector."""
    x = torch.randn(NUM, IN, requires_grad=True)
    splitter = ByLayers(stage_of(Net(), (x,), "export"))
    gc.collect()
    gc.disable()
    try:
        out = splitter.module(x)
        kept = [weakref.ref(out), weakref.ref(x)]
        del out, x
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()
