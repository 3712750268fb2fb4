"""Cuts: where they may be, what the stages hold and what passes between them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from hocket.errors import ModelError
from hocket.model.capture.capture import Captured, capture
from hocket.model.capture.captured import enough_layers, with_more_layers
from hocket.model.stages.cut import (
    boundaries_from_names,
    cut,
    num_frozen_stages,
    shared_parameters,
)
from tests.model.support.small_models import CASES, captured_case, vit
from tests.model.support.stages_by_hand import even_cut, forward


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_stages", [1, 3])
def test_names_and_tensors_are_the_uncut_models(name: str, num_stages: int) -> None:
    """All of `state_dict()` and `named_parameters()`, and the very same objects."""
    case, captured = captured_case(name)
    stages = even_cut(captured, num_stages)

    state = {}
    for stage in stages:
        state.update(stage.state_dict(keep_vars=True))
    assert state.keys() == case.model.state_dict().keys()
    for key, tensor in case.model.state_dict(keep_vars=True).items():
        assert state[key] is tensor
    parameters = {key: x for stage in stages for key, x in stage.named_parameters()}
    expected = dict(case.model.named_parameters())
    assert parameters.keys() == expected.keys()
    assert all(parameters[key] is expected[key] for key in expected)
    buffers = {key for stage in stages for key, _ in stage.named_buffers()}
    assert buffers == {key for key, _ in case.model.named_buffers()}


def test_tied_weights_are_shared_under_their_first_name() -> None:
    """The last stage of GPT-2 calls its output layer by the embedding's name."""
    captured = captured_case("gpt2-sdpa")[1]
    boundaries = boundaries_from_names(captured, ["transformer.h.1", "lm_head"])
    stages = cut(captured, boundaries)

    assert shared_parameters(stages) == {"transformer.wte.weight": (0, 2)}
    assert dict(stages[2].named_parameters()).keys() == {"transformer.wte.weight"}
    assert list(stages[2].state_dict()) == ["transformer.wte.weight", "lm_head.weight"]


def test_nothing_is_shared_in_one_stage() -> None:
    """Then one backward adds both gradients."""
    assert shared_parameters(cut(captured_case("gpt2-sdpa")[1], ())) == {}


def test_a_mask_is_made_where_it_is_needed() -> None:
    """BERT's mask comes from the batch, which every worker has; it is never sent."""
    captured = captured_case("bert-eager")[1]
    names = ["bert.encoder.layer.0", "bert.encoder.layer.1", "classifier"]

    stages = cut(captured, boundaries_from_names(captured, names))

    assert [stage.batch_inputs for stage in stages] == [(0,), (1,), (1,), ()]
    assert [len(stage.inputs) for stage in stages] == [0, 1, 1, 1]


def test_what_only_depends_on_the_shape_needs_no_batch() -> None:
    """GPT-2's causal mask and positions are made from the size of what is received."""
    stages = even_cut(captured_case("gpt2-eager")[1], 4)

    assert [stage.batch_inputs for stage in stages] == [(0,), (), (), ()]


def test_values_needed_later_are_passed_on() -> None:
    """The skips of a U-Net, through stages that do not use them."""
    stages = cut(captured_case("unet")[1], (1, 2, 3, 4))

    for before, after in pairwise(stages):
        assert before.outputs == after.inputs
    names = [{value.name for value in stage.inputs} for stage in stages]
    (skip,) = names[1]
    assert all(skip in received for received in names[1:4])


def test_a_stage_that_reads_only_parameters_gets_the_batch() -> None:
    """It would otherwise know neither its device nor the number of samples."""
    case, captured = captured_case("query")
    stages = cut(captured, range(1, len(captured.layers)))

    _, outputs = forward(stages, case.args)

    assert stages[0].batch_inputs == (0,)
    assert stages[0].outputs[0].per_sample == (0, 0)
    assert outputs[-1].shape == (4, 3)


def test_stages_name_the_layers_that_draw() -> None:
    """Others are not seeded; the numbers are those of the uncut model's layers."""
    case = vit("sdpa")
    for module in case.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    first = case.model.get_submodule("vit.embeddings.dropout")
    assert isinstance(first, nn.Dropout)
    first.p = 0.5

    stages = even_cut(case.capture(), 3)

    assert [stage.random_layers for stage in stages] == [(0,), (), ()]


@pytest.mark.parametrize("boundaries", [(0,), (6,), (2, 2), (3, 1), (-1,)])
def test_impossible_boundaries_are_refused(boundaries: tuple[int, ...]) -> None:
    """Each stage begins after the one before it, with a layer that there is."""
    captured = captured_case("vit-sdpa")[1]

    with pytest.raises(ModelError, match=r"between 1 and 5, .* has 6 layers"):
        cut(captured, boundaries)


def test_modules_that_begin_together_name_the_same_cut() -> None:
    """The block, and the first module in it."""
    captured = captured_case("vit-sdpa")[1]

    for name in ("vit.layers.1", "vit.layers.1.layernorm_before"):
        assert boundaries_from_names(captured, [name]) == (3,)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["vit.layer.1"], r"is no module of the model; did you mean 'vit\.layers\.1'"),
        (["vit.layers.1.mlp"], r"with cut=\['vit\.layers\.1\.mlp'\]; did you mean"),
        (["vit.embeddings"], "the model begins with vit.embeddings"),
        (
            ["classifier", "vit.layers.0"],
            "follow the order of the model, .* layer 5, and .* layer 1",
        ),
        (["vit.layers.0", "vit.layers.0.layernorm_before"], "each at another layer"),
    ],
)
def test_impossible_names_are_refused(names: list[str], message: str) -> None:
    """With the nearest ones that are possible."""
    with pytest.raises(ModelError, match=message):
        boundaries_from_names(captured_case("vit-sdpa")[1], names)


def test_freezing_after_the_capture_is_refused() -> None:
    """What is sent back was decided by what wanted a gradient."""
    case = vit("sdpa")
    captured = case.capture()
    case.model.requires_grad_(False)

    with pytest.raises(ModelError, match=r"requires_grad .* capture it again"):
        cut(captured, (1,))


@pytest.mark.parametrize(("num_frozen", "num_found"), [(0, 0), (1, 1), (2, 2), (3, 2)])
def test_stages_with_nothing_to_train_are_counted(
    num_frozen: int, num_found: int
) -> None:
    """From the front; never the last one, which has the loss."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[:num_frozen].requires_grad_(False)
    captured = capture(model, (torch.randn(3, 4),))

    assert num_frozen_stages(cut(captured, (1, 2))) == num_found


def test_a_frozen_middle_is_no_frozen_beginning() -> None:
    """A gradient has to go through it."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[1].requires_grad_(False)
    captured = capture(model, (torch.randn(3, 4),))

    assert num_frozen_stages(cut(captured, (1, 2))) == 0


def test_a_frozen_batch_norm_stays_frozen() -> None:
    """In a Sequential as in a captured graph, after any call of `train()`."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    x: Tensor = torch.randn(3, 4)
    model[1].eval()
    for how in ("sequential", "export"):
        (stage,) = cut(capture(model, (x,), capture=how), ())
        stage.eval()
        stage.train()
        stage(x)

    assert model[1].num_batches_tracked == 0


class Skip(nn.Module):
    """A skip over the whole network, and a batch norm that only one tensor enters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = y = self.stem(x)
        for block in self.blocks:
            y = torch.relu(block(y))
        y = self.head(self.norm(torch.dropout(y, 0.5, self.training) + first))
        return torch.dropout(y, 0.5, self.training)


def test_a_cut_may_be_named_wherever_it_is_possible() -> None:
    """Also before a module without a matrix of weights, where no layer begins."""
    model, x = Skip(), torch.randn(4, 6)
    assert "norm" not in [layer.name for layer in capture(model, (x,)).layers]

    captured = capture(model, (x,), cut=["norm"])

    (boundary,) = boundaries_from_names(captured, ["norm"])
    assert len(captured.layers[boundary].received) == 1


def test_there_are_as_many_layers_as_places_if_so_many_are_wanted() -> None:
    """More tensors that cross are a cost, and no reason against a cut."""
    captured = capture(Skip(), (torch.randn(4, 6),))

    assert enough_layers(captured, 2) is captured
    assert len(enough_layers(captured, 11).layers) == len(captured.places) + 1
    assert len(enough_layers(captured, 9).layers) >= 9


def test_random_numbers_do_not_depend_on_the_cut() -> None:
    """A dropout is seeded alike, whether a layer begins between it and another."""
    x = torch.randn(4, 6)
    captured = capture(Skip(), (x,))

    def seeds(captured: Captured, names: list[str]) -> list[int]:
        stages = cut(captured, boundaries_from_names(captured, names))
        return [number for stage in stages for number in stage.random_layers]

    whole = seeds(captured, [])
    assert len(whole) == 2
    assert seeds(with_more_layers(captured, ["norm"]), ["blocks.1", "norm"]) == whole
