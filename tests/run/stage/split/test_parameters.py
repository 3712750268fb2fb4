"""Parameters that are shared, hooked, used otherwise, or not at all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hocket.model.stages.splitter import Remainder
from hocket.model.stages.stage import StageModule
from tests.in_turns import in_turns
from tests.run.stage.split.halves import How, assert_same, halves, whole

HOWS: tuple[How, How] = ("export", "sequential")
SPLITTERS = ("layers", "graph")


class Twice(nn.Module):
    """One linear layer and one convolution, each used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.conv = nn.Conv1d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.conv(torch.tanh(self.linear(x))))
        return x


class Tied(nn.Module):
    """An embedding whose weight is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.embed(words)))
        return found


class Otherwise(nn.Module):
    """The first weight is used by an operator that no route is for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.unused = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) + self.first.weight.sum(0)
        x = self.second(x)
        found: Tensor = torch.relu(F.linear(x, self.second.weight, self.first.bias))
        return found


class Untold(nn.Module):
    """Layers of other kinds: their parameters get their gradients with I."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.GroupNorm(2, 6)
        self.scale = nn.Parameter(torch.randn(6))
        self.weights = nn.Parameter(torch.randn(2, 6))
        self.factors = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(x)
        y, _ = self.attention(x, x, x, need_weights=False)
        z = self.norm((x + y * self.scale).transpose(1, 2))
        return F.linear(self.factors(z.transpose(1, 2)), self.weights)


class Checkpointed(nn.Module):
    """Keeps nothing of its middle, and runs it again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self._middle, x, use_reentrant=False)
        found: Tensor = self.second(y)
        return found

    def _middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


MODELS: dict[str, tuple[Any, Any]] = {
    "twice": (Twice, (2, 3, 5)),
    "tied": (Tied, None),
    "otherwise": (Otherwise, (4, 5)),
    "untold": (Untold, (2, 4, 6)),
}

# In captured code. The attention's projection is a call of its own there.
WAIT: dict[str, tuple[str, ...]] = {
    "twice": ("linear.weight", "linear.bias", "conv.weight", "conv.bias"),
    "tied": ("embed.weight",),
    "otherwise": (),
    "untold": (
        "attention.in_proj_weight",
        "attention.in_proj_bias",
        "attention.out_proj.weight",
        "attention.out_proj.bias",
        "weights",
    ),
}


def _make(name: str) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = MODELS[name][0]()
    return model.double()


def _inputs(name: str) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(3)
    shape = MODELS[name][1]
    if shape is None:
        return (torch.randint(11, (3, 4), generator=rng),)
    return (torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_(),)


@pytest.mark.parametrize(("name", "by", "how"), in_turns(MODELS, SPLITTERS, HOWS))
def test_equals_the_backward(name: str, by: str, how: How) -> None:
    """Up to the order in which a parameter's gradients of several uses are added."""
    expected = whole(_make(name), _inputs(name), how)
    actual = halves(_make(name), _inputs(name), how, by=by)

    assert_same(actual, expected, 1e-14)


@pytest.mark.parametrize("how", HOWS)
def test_several_uses_are_added_in_autograds_order(how: How) -> None:
    """To the last bit, in float32."""
    torch.manual_seed(3)
    model, again = Twice(), Twice()
    again.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 5, requires_grad=True)

    assert_same(halves(again, (x,), how), whole(model, (x,), how))


@pytest.mark.parametrize("name", MODELS)
def test_a_parameter_comes_whole_with_w_or_whole_with_i(name: str) -> None:
    """In captured code, where all uses are known; and what can wait does."""
    after_i: dict[str, Tensor | None] = {}

    def look(stage: StageModule, left: Remainder) -> None:
        for path, parameter in stage.named_parameters():
            grad = parameter.grad
            after_i[path] = None if grad is None else grad.clone()

    grads = halves(_make(name), _inputs(name), "export", between=look)

    for path, grad in after_i.items():
        final = grads[path]
        assert grad is None or (final is not None and torch.equal(grad, final)), path
    waited = {x for x in after_i if after_i[x] is None and grads[x] is not None}
    assert waited == set(WAIT[name])


@pytest.mark.parametrize(("name", "by", "how"), in_turns(MODELS, SPLITTERS, HOWS))
def test_hooks_hear_of_complete_gradients_once(name: str, by: str, how: How) -> None:
    """Those on the gradient, which may change it, and those behind the adding up."""
    logs: list[dict[str, list[Tensor]]] = []
    results = []
    for run in (whole, partial(halves, by=by)):
        model = _make(name)
        log: dict[str, list[Tensor]] = {}
        for path, parameter in model.named_parameters():
            heard = log.setdefault(path, [])

            def change(grad: Tensor, heard: list[Tensor] = heard) -> Tensor:
                heard.append(grad.detach().clone())
                return grad * 2

            def note(parameter: Tensor, heard: list[Tensor] = heard) -> None:
                assert parameter.grad is not None
                heard.append(parameter.grad.detach().clone())

            parameter.register_hook(change)
            parameter.register_post_accumulate_grad_hook(note)
        results.append(run(model, _inputs(name), how))
        logs.append(log)

    expected, actual = results
    assert_same(actual, expected, 1e-14)
    for path, heard in logs[0].items():
        assert len(logs[1][path]) == len(heard), path
        for a, b in zip(logs[1][path], heard, strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-14), path


def test_modules_that_checkpoint_themselves() -> None:
    """What they run again in the backward keeps as much as it did the first time."""
    torch.manual_seed(3)
    model, again = Checkpointed(), Checkpointed()
    again.load_state_dict(model.state_dict())
    x = torch.randn(4, 5, requires_grad=True)

    expected = whole(model, (x,), "sequential")
    assert_same(halves(again, (x,), "sequential"), expected, 1e-6)
