"""A profile adds up to the whole, knows what is kept, and leaves no trace."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.model.capture.capture import capture
from hocket.model.profile.measure import profile
from hocket.model.profile.profile import Profile
from hocket.model.profile.work import stage_costs
from hocket.model.stages.cut import cut
from hocket.run.stage.split.by_layers import ByLayers
from tests.model.capture.test_submodules import Notes, X
from tests.model.support.small_models import captured_case
from tests.model.support.stages_by_hand import even_cut

CPU = torch.device("cpu")


def measured(model: nn.Module, x: Tensor) -> Profile:
    """The profile of a model that takes one tensor."""
    return profile(capture(model, (x,)), (x,), device=CPU, make_splitter=ByLayers)


def test_every_layer_has_its_times() -> None:
    """Positive where there is work; nothing flows back out of the first layer."""
    case, captured = captured_case("gpt2-sdpa")
    leaves = pytree.tree_leaves((case.args, case.kwargs))

    found = profile(
        captured,
        leaves,
        device=CPU,
        make_splitter=ByLayers,
        finish=lambda out: out.logits.mean(),
    )

    assert [layer.name for layer in found.layers] == [x.name for x in captured.layers]
    assert all(layer.forward_s > 0 for layer in found.layers)
    assert all(layer.input_grad_s > 0 for layer in found.layers[1:])
    assert all(layer.weight_grad_s >= 0 for layer in found.layers)
    assert sum(layer.weight_grad_s for layer in found.layers) > 0
    assert found.layer_s == tuple(layer.total_s for layer in found.layers)
    hidden_bytes = 4 * 8 * 32 * 8
    assert [x.received_bytes for x in found.layers] == [0] + [hidden_bytes] * 6
    assert [x.received_grad_bytes for x in found.layers] == [0] + [hidden_bytes] * 6


class Blocks(nn.Module):
    """Four equal blocks, of which the second is frozen, and a wider one."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 8, 8, 8, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))
            for width in widths
        )
        self.blocks[1].requires_grad_(False)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return cast(Tensor, self.head(x))


def test_layers_that_do_the_same_share_their_seconds() -> None:
    """All others have their own: the first, the frozen, a wider one, and the last."""
    x = torch.randn(8, 8, requires_grad=False)
    captured = capture(Blocks(), (x,), cut=[f"blocks.{i}" for i in range(1, 5)])
    numbers = dict(zip([x.name for x in captured.layers], captured.alike, strict=True))

    assert numbers["blocks.2"] == numbers["blocks.3"]
    others = ("blocks.0", "blocks.1", "blocks.2", "blocks.4", "head")
    assert len({numbers[name] for name in others}) == len(others)

    found = profile(captured, (x,), device=CPU, make_splitter=ByLayers)
    seconds = {x.name: (x.forward_s, x.input_grad_s, x.split_s) for x in found.layers}
    assert seconds["blocks.2"] == seconds["blocks.3"]


def test_a_larger_layer_takes_longer() -> None:
    """256 times the work must show, on any machine."""
    sizes = ((8, 8), (8, 512), (512, 512), (512, 8))
    parts = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in sizes]

    found = measured(nn.Sequential(*parts), torch.randn(64, 8))

    assert found.layer_s[2] > 3 * found.layer_s[0]


def test_kept_bytes_by_hand() -> None:
    """What tanh returns; the batch and the weights are there anyway."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    first, second = measured(model, torch.randn(5, 4)).layers

    assert first.activation_bytes == 5 * 8 * 4
    assert (second.activation_bytes, second.kept_input_bytes) == (0, 0)


def test_an_input_that_only_the_next_layer_keeps() -> None:
    """Linear does not keep what it returns; the layer behind it does."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    x = torch.randn(5, 4)
    captured = capture(model, (x,))

    found = profile(captured, (x,), device=CPU, make_splitter=ByLayers)

    first, second = found.layers
    assert (first.activation_bytes, second.kept_input_bytes) == (0, 5 * 8 * 4)
    for boundaries, expected in (((), [160]), ((1,), [0, 0])):
        stages = cut(captured, boundaries)
        costs = stage_costs(found, boundaries, stages)
        assert [cost.activation_bytes for cost in costs] == expected


def test_stage_costs_add_up() -> None:
    """Times over the layers of a stage, bytes at its edges, weights as they are."""
    case, captured = captured_case("vit-sdpa")
    leaves = pytree.tree_leaves((case.args, case.kwargs))
    found = profile(
        captured,
        leaves,
        device=CPU,
        make_splitter=ByLayers,
        finish=lambda out: out.logits.mean(),
    )
    stages = even_cut(captured, 2)

    costs = stage_costs(found, (3,), stages)

    total = sum(x.forward_s + x.input_grad_s + x.weight_grad_s for x in costs)
    assert total == pytest.approx(sum(found.layer_s))
    first, second = costs
    assert first.output_bytes == second.input_grad_bytes == 4 * 5 * 32 * 8
    assert first.input_grad_bytes == second.output_bytes == 0
    sizes = [sum(p.nbytes for p in stage.parameters()) for stage in stages]
    assert [cost.weight_bytes for cost in costs] == sizes
    assert [cost.gradient_bytes for cost in costs] == sizes


def test_what_it_costs_to_have_a_backward_apart_is_shared_out_by_w() -> None:
    """Small products, each with a call of the host: seen in the whole model."""
    torch.set_num_threads(1)
    parts = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(nn.LayerNorm(8), *parts)

    layers = measured(model, torch.randn(4, 8)).layers

    shares = [x.split_s / x.weight_grad_s for x in layers[1:]]
    assert shares == pytest.approx([shares[0]] * len(shares))
    assert sum(x.split_s for x in layers) > 0


def test_leaves_the_model_as_it_was() -> None:
    """Buffers, gradients, modes and random numbers: a run starts as if unmeasured."""
    case, captured = captured_case("odd")
    leaves = pytree.tree_leaves((case.args, case.kwargs))
    model = case.model
    model.zero_grad()
    model.get_submodule("index").weight.grad = marked = torch.ones(2, 6).double()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    random = torch.get_rng_state()

    def finish(out: Any) -> Tensor:
        total: Tensor = out[0].sum()
        return total

    profile(captured, leaves, device=CPU, make_splitter=ByLayers, finish=finish)

    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert list(grads) == ["index.weight"]
    assert grads["index.weight"] is marked
    assert torch.equal(marked, torch.ones(2, 6))
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)


def test_forgets_what_modules_note_on_themselves() -> None:
    """Counters, and buffers that they assign anew: the objects that were there."""
    model = Notes()
    captured = capture(model, (X,), cut=["b"])
    buffers = dict(model.named_buffers())

    profile(captured, (X,), device=CPU, make_splitter=ByLayers)

    check_notes(model, buffers)


def check_notes(model: Notes, buffers: dict[str, Tensor]) -> None:
    """It is as if it had not been called."""
    now = dict(model.named_buffers())
    assert now.keys() == buffers.keys()
    assert all(now[name] is buffer for name, buffer in buffers.items())
    assert all(buffer.eq(0).all() for buffer in buffers.values())
    for module in (model.a, model.b):
        assert module.calls == 0
        assert "last" not in vars(module)
