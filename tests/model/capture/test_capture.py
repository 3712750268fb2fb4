"""What a capture knows of a model is true, and the model does not notice it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import ModelError
from hocket.model.capture.capture import capture
from hocket.model.stages.cut import cut
from tests.model.support.small_models import CASES, captured_case, gpt2
from tests.model.support.stages_by_hand import forward


class InPlace(nn.Module):
    """Changes in place what it has just computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.layers
        y = torch.relu_(a(x))
        view = y[:, :2]
        z = b(y)
        y += 1  # `view` sees it, so nothing may be cut between here and there
        z = c(z) + view.sum(1, keepdim=True)
        out: Tensor = d(z)
        return out


class Pinned(nn.Module):
    """Writes its batch size into a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x).view(6, 2, 2).flatten(1))
        return out


@pytest.mark.parametrize("name", CASES)
def test_messages_are_as_predicted(name: str) -> None:
    """Shapes, types and gradients at every cut, for other numbers of samples too."""
    case, captured = captured_case(name)
    stages = cut(captured, range(1, len(captured.layers)))
    for num_samples in (2, 5):
        leaves = pytree.tree_leaves(case.rows(num_samples, 0))

        _, outputs = forward(stages, leaves)

        for stage, values in zip(stages[:-1], outputs[:-1], strict=True):
            for known, value in zip(stage.outputs, values, strict=True):
                assert value.shape == known.shape_for(num_samples)
                assert value.dtype == known.dtype
                assert value.requires_grad == known.requires_grad


@pytest.mark.parametrize("name", ["pairs", "odd", "modes", "gpt2-sdpa"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    """Modes, buffers, gradients, attributes, random numbers."""
    case = CASES[name]()
    case.model.eval()
    before = {key: value.clone() for key, value in case.model.state_dict().items()}
    attributes = [sorted(vars(module)) for module in case.model.modules()]
    random = torch.get_rng_state()

    case.capture()

    assert all(torch.equal(x, before[k]) for k, x in case.model.state_dict().items())
    assert [sorted(vars(module)) for module in case.model.modules()] == attributes
    assert not any(module.training for module in case.model.modules())
    assert all(parameter.grad is None for parameter in case.model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_belongs_to_a_layer(name: str) -> None:
    """Those that the model never uses, too: they are in its checkpoints."""
    case, captured = captured_case(name)

    layers = captured.layers

    parameters = {name for layer in layers for name in layer.parameters}
    assert parameters == {name for name, _ in case.model.named_parameters()}
    buffers = {name for layer in layers for name in layer.buffers}
    assert buffers == {name for name, _ in case.model.named_buffers()}
    sizes = {name: x.nbytes for name, x in case.model.named_parameters()}
    for layer in layers:
        assert layer.weight_bytes == sum(sizes[name] for name in layer.parameters)


def test_layers_have_readable_names() -> None:
    """The blocks of the model, cut once inside where a residual stream allows it."""
    names = {
        key: [x.name for x in captured_case(key)[1].layers]
        for key in ("mlp", "resnet", "vit-sdpa", "gpt2-sdpa", "bert-eager")
    }

    assert names["mlp"] == ["0", "3", "4", "6"]
    assert names["vit-sdpa"] == [
        "vit.embeddings",
        "vit.layers.0",
        "vit.layers.0.layernorm_after",
        "vit.layers.1",
        "vit.layers.1.layernorm_after",
        "classifier",
    ]
    assert names["gpt2-sdpa"] == [
        "transformer.wte",
        "transformer.wpe",
        "transformer.h.0",
        "transformer.h.0.ln_2",
        "transformer.h.1",
        "transformer.h.1.ln_2",
        "lm_head",
    ]
    assert names["bert-eager"][3:] == [
        "bert.encoder.layer.0",
        "bert.encoder.layer.0.intermediate",
        "bert.encoder.layer.1",
        "bert.encoder.layer.1.intermediate",
        "bert.pooler",
        "classifier",
    ]
    assert {"conv", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "fc"} <= set(
        names["resnet"]
    )


def test_no_cut_where_memory_is_changed_later() -> None:
    """A received copy would not see the change that the uncut model sees."""
    captured = capture(InPlace(), (torch.randn(4, 4),))

    assert [layer.name for layer in captured.layers] == [
        "layers.0",
        "layers.2",
        "layers.3",
    ]


def test_a_buffer_that_changes_stays_in_one_stage() -> None:
    """A batch norm that is called twice cannot be in two places."""
    captured = captured_case("repeated")[1]

    users = [layer for layer in captured.layers if "bn.running_mean" in layer.buffers]
    assert len(users) == 1


def test_nothing_is_sent_back_into_frozen_layers() -> None:
    """A frozen beginning receives no gradient, so none is computed for it."""
    case = gpt2("sdpa")
    for name, parameter in case.model.named_parameters():
        parameter.requires_grad_("h.1" in name)

    received = [value for layer in case.capture().layers for value in layer.received]

    assert [value.requires_grad for value in received] == [False] * 4 + [True] * 2


def test_a_pinned_batch_size_is_known_and_refused() -> None:
    """Not silently wrong for the last, smaller batch: an error that says why."""
    captured = capture(Pinned(), (torch.randn(6, 4),))
    (stage,) = cut(captured, ())

    assert not captured.any_batch
    assert "[6, 2, 2]" in captured.fixed_batch
    assert stage(torch.randn(6, 4)).shape == (6, 4)
    with pytest.raises(ModelError, match=r"got num_samples=3, .* only with the 6"):
        stage(torch.randn(3, 4))


def test_one_sample_is_example_enough() -> None:
    """Exporters take a dimension of 1 for a constant; microbatches are often of 1."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    captured = capture(model, (torch.randn(1, 4),), capture="export")
    (stage,) = cut(captured, ())

    assert captured.any_batch
    assert stage(torch.randn(5, 4)).shape == (5, 4)


def test_digests_of_other_work_differ() -> None:
    """Equal for the same work captured twice; not for other shapes or other layers."""
    model, other = (
        nn.Sequential(nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
    )
    x = torch.randn(2, 4)

    digests = [
        capture(model, (x,)).digest,
        capture(model, (x,)).digest,
        capture(model, (torch.randn(3, 4),)).digest,
        capture(other, (x,)).digest,
    ]

    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
