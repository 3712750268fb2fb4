"""Weights that each module draws for itself, whatever else a worker draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from hocket.errors import ConfigError, ModelError
from hocket.model.trace.state import State
from hocket.model.weights.fresh import init
from hocket.model.weights.given import GivenWeights


class Net(nn.Module):
    """Layers of many kinds, two of which share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.lstm = nn.LSTM(8, 8)
        self.conv = nn.Conv1d(1, 4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(8, 7)
        self.head.weight = self.table.weight


class Computed(nn.Module):
    """Buffers of several types, which the constructor computes."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(4).to(kind), persistent=False)


class Recomputed(Computed):
    """One that says how."""

    def reset_parameters(self) -> None:
        """Compute the table again."""
        assert isinstance(self.table, Tensor)
        self.table.copy_(torch.arange(4))


def on_meta(make: Any) -> Any:
    """Make a model on the meta device."""
    with torch.device("meta"):
        return make()


def drawn(make: Any, *names: str, seed: int = 0, **how: Any) -> dict[str, Tensor]:
    """The tensors that a worker holds which needs these names, or all."""
    model = on_meta(make)
    tensors = State.of(model).tensors
    GivenWeights(model, init(seed, **how)).hold(names or tensors)
    return {name: tensors[name].detach() for name in names or tensors}


def test_values_depend_on_the_seed_and_the_name_alone() -> None:
    """Not on what else is drawn, nor on what was drawn before."""
    whole = drawn(Net)
    for name in whole:
        assert torch.equal(drawn(Net, name)[name], whole[name]), name
    model = on_meta(Net)
    given = GivenWeights(model, init())
    for names in (["lstm.bias_hh_l0"], ["head.bias", "table.weight"], list(whole)):
        given.hold(names)
    again = State.of(model).tensors
    assert all(torch.equal(again[name], x) for name, x in whole.items())
    other = drawn(Net, seed=1)
    assert not torch.equal(other["table.weight"], whole["table.weight"])


class Root(nn.Module):
    """One that initializes all of its parts anew."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def reset_parameters(self) -> None:
        """Draw."""
        for part in self.parts:
            nn.init.normal_(part.get_parameter("weight"))


def test_what_has_values_keeps_them() -> None:
    """Also where a module draws them with what is on meta, or the whole its parts."""
    model: Any = on_meta(Root)
    model.parts[0].bias = nn.Parameter(torch.full((4,), 5.0))
    model.parts[1].weight = nn.Parameter(torch.full((4, 4), 7.0))
    GivenWeights(model, init()).hold(State.of(model).tensors)
    assert torch.equal(model.parts[0].bias, torch.full((4,), 5.0))
    assert torch.equal(model.parts[1].weight, torch.full((4, 4), 7.0))
    assert model.parts[0].weight.std() > 0.5


def test_values_are_those_of_each_modules_own_initializer() -> None:
    """A tied weight is drawn by the module that has it first."""
    found = drawn(Net)
    assert found["table.weight"].std() > 0.6  # N(0, 1), as an embedding's
    assert found["head.bias"].abs().max() <= 8**-0.5
    assert found["block.self_attn.in_proj_bias"].abs().max() == 0
    assert found["block.self_attn.out_proj.bias"].abs().max() == 0
    assert found["block.self_attn.in_proj_weight"].std() > 0
    assert found["lstm.weight_ih_l0"].abs().max() <= 8**-0.5
    assert torch.equal(found["norm.running_var"], torch.ones(3))
    assert found["norm.num_batches_tracked"] == 0


class Whole(nn.Module):
    """One that initializes its parts, as `apply` does in many constructors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 3.0)


class Alone(nn.Linear):
    """One whose method of that name is about itself."""

    def _init_weights(self) -> None:
        raise AssertionError


def test_a_whole_initializes_its_parts() -> None:
    """After their own initializers."""
    found = drawn(Whole)
    assert torch.equal(found["inner.0.weight"], torch.full((4, 4), 3.0))
    assert found["inner.0.bias"].abs().max() > 0
    assert drawn(lambda: Alone(2, 2))["weight"].std() > 0


def test_plain_constructor_gives_the_very_same_numbers() -> None:
    """Where a function is given that calls it."""
    torch.manual_seed(3)
    plain = State.of(Net()).tensors
    before = torch.random.get_rng_state()
    found = drawn(Net, seed=3, like=Net)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert found.keys() == plain.keys()
    assert all(torch.equal(x, plain[name]) for name, x in found.items())


@pytest.mark.parametrize(
    "kind", [torch.float32, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_what_no_initializer_sets_is_named(kind: torch.dtype) -> None:
    """Of any type; a module that says how is asked."""
    with pytest.raises(
        ModelError, match=r"no initializer sets table \(of a Computed\)"
    ):
        drawn(lambda: Computed(kind))
    assert torch.equal(
        drawn(lambda: Recomputed(kind))["table"], torch.arange(4).to(kind)
    )


def test_what_a_parametrization_hides_is_named() -> None:
    """The layer under it initializes what is computed, not what is trained."""

    def normed() -> nn.Module:
        return parametrizations.weight_norm(nn.Linear(2, 2))

    with pytest.raises(ModelError, match=r"parametrizations\.weight\.original0"):
        drawn(normed)
    torch.manual_seed(0)
    plain, found = State.of(normed()).tensors, drawn(normed, like=normed)
    assert all(torch.equal(x, plain[name]) for name, x in found.items())


def test_mistakes_are_named() -> None:
    """With the way out."""
    with pytest.raises(ConfigError, match="no effect: no tensor of the model is on"):
        GivenWeights(Net(), init())
    with pytest.raises(ConfigError, match=r"like=lambda: Net\(\.\.\.\)"):
        drawn(Net, like="eager")
    with pytest.raises(ConfigError, match="it returned str"):
        drawn(Net, like=lambda: "a model")
    with pytest.raises(ModelError, match=r"head\.bias is \(2,\), and this one's is"):
        drawn(lambda: nn.ModuleDict({"head": nn.Linear(2, 3)}), like=smaller)
    wrong: list[Any] = [(True, None), ("0", None), (0, "torch")]
    for seed, like in wrong:
        with pytest.raises(ConfigError, match=r"hocket\.init"):
            init(seed, like=like)


def smaller() -> nn.Module:
    """Another model."""
    return nn.ModuleDict({"head": nn.Linear(2, 2)})
