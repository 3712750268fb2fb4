"""Unusual models train as in the plain loop, or are refused by name.

An int16 buffer ended `state_dict()` with gloo's "Invalid scalar type", an expanded one
the construction; a view that channels_last allows failed on two workers only; a model
without anything to train returned losses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.errors import ConfigError, HocketError, ModelError
from tests.run.support.forked import answers_of
from tests.run.support.plainly import SGD, train_plainly
from tests.run.support.started import started


class Scaled(nn.Module):
    """Has buffers of types that gloo's collectives refuse, and an expanded one."""

    short: Tensor
    unsigned: Tensor
    float8: Tensor
    expanded: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        values = torch.arange(1, 5)
        self.register_buffer("short", values.to(torch.int16))
        self.register_buffer("unsigned", values.to(torch.uint16))
        self.register_buffer("float8", values.double().to(torch.float8_e4m3fn))
        self.register_buffer("expanded", values.double().expand(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.short.double() + self.unsigned.double() + self.float8.double()
        return torch.tanh(self.linear(x) * scale / 12 + self.expanded[0])


class Flat(nn.Module):
    """A view that only strides of channels_last allow."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).view(x.shape[0], -1)


class Transposed(nn.Module):
    """Hands on a transposed tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 2, 2).transpose(1, 2)


class Back(nn.Module):
    """Views what only a transposed tensor allows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).view(-1, 4)


def buffers() -> tuple[nn.Module, tuple[int, ...]]:
    """Of odd types, also where replicas agree on the first one's."""
    return nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 3)), (4,)


def channels_last() -> tuple[nn.Module, tuple[int, ...]]:
    """Cut before the view."""
    net: Any = nn.Sequential(nn.Conv2d(3, 4, 3), Flat(), nn.Linear(16, 3))
    return net.to(memory_format=torch.channels_last), (3, 4, 4)


def transposed() -> tuple[nn.Module, tuple[int, ...]]:
    """Cut before the view."""
    first = nn.Sequential(nn.Linear(4, 4), Transposed())
    return nn.Sequential(first, Back(), nn.Tanh(), nn.Linear(4, 3)), (4,)


def sequences() -> tuple[nn.Module, tuple[int, ...]]:
    """Stages that end in a layer with a bias, on three dimensions."""
    last = nn.Sequential(nn.Tanh(), nn.Linear(4, 3))
    return nn.Sequential(nn.Linear(4, 4), last, nn.Flatten(1), nn.Linear(6, 3)), (2, 4)


CASES: Final[dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]]] = {
    made.__name__: made for made in (buffers, channels_last, transposed, sequences)
}


def _made(name: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    net, shape = CASES[name]()
    batches = [(torch.randn(8, *shape), torch.randn(8, 3)) for _ in range(3)]
    return net.double(), [(x.double(), y.double()) for x, y in batches]


def train(folder: str, name: str, options: dict[str, Any] | None = None) -> float:
    """Train a case; return the largest relative difference of any tensor."""
    torch.set_num_threads(1)
    loss = nn.functional.mse_loss
    net, batches = _made(name)
    with started(
        net, loss, SGD, batches[0], num_microbatches=4, run_dir=folder, **options or {}
    ) as pipeline:
        for batch in batches:
            pipeline.step(batch)
        found = pipeline.state_dict()
    net, batches = _made(name)
    train_plainly(net, loss, SGD, batches)
    expected = net.state_dict()
    assert [*found] == [*expected]
    assert all(found[n].dtype == x.dtype for n, x in expected.items())
    pairs = [(found[n].double(), x.double()) for n, x in expected.items()]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


pytestmark = pytest.mark.timeout(120)
TOLERANCE: Final = 1e-10
ENTRY: Final = f"{__name__}:train"
BATCH: Final = torch.ones(8, 6), torch.ones(8, 3)


@pytest.mark.parametrize("name", CASES)
def test_one_worker_trains_as_the_plain_loop(name: str, tmp_path: Path) -> None:
    """All tensors of the state keep their types."""
    assert train(str(tmp_path), name) <= TOLERANCE


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "options", [{"cut": ["1"]}, {"num_replicas": 2}], ids=["stages", "replicas"]
)
def test_two_workers_train_as_the_plain_loop(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Values arrive with their strides, buffers with their types."""
    found = answers_of(ENTRY, str(tmp_path), name, options, folder=tmp_path)

    assert max(found) <= TOLERANCE


def test_a_split_backward_ends_in_a_layer_with_a_bias(tmp_path: Path) -> None:
    """In a stage between others: findings/torch_zero_bubble_view_output.sh."""
    options = {"cut": ["1", "2"], "schedule": "zb-h1"}
    arguments = str(tmp_path), "sequences", options
    found = answers_of(ENTRY, *arguments, num_workers=3, folder=tmp_path)

    assert max(found) <= TOLERANCE


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Any optimizer."""
    return torch.optim.SGD(parameters, 0.1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(3)), "0.weight has no shape yet"),
        (lambda: torch.jit.script(nn.Linear(6, 3)), "is a scripted module"),
    ],
)
def test_what_cannot_be_captured_is_refused(make: Any, message: str) -> None:
    """By pipelines, plans and captured steps."""
    net = make()
    loss = nn.functional.mse_loss
    with pytest.raises(ConfigError, match=message):
        hocket.Pipeline(net, loss, optimizer=sgd, example=BATCH)
    with pytest.raises(ConfigError, match=message):
        hocket.compile_step(net, loss, sgd, example=BATCH)
    with pytest.raises(HocketError, match=message):
        hocket.plan(net, BATCH, loss, num_devices=1, hardware="a100-80g")


def test_nothing_to_train_is_an_error_at_the_first_step(tmp_path: Path) -> None:
    """Plain torch fails in `backward`; evaluation goes on."""
    net = nn.Linear(6, 3).requires_grad_(requires_grad=False)
    loss = nn.functional.mse_loss
    with hocket.Pipeline(
        net, loss, optimizer=sgd, example=BATCH, run_dir=tmp_path
    ) as pipeline:
        assert pipeline.evaluate([BATCH]).num_samples == 8
        with pytest.raises(ModelError, match="all of the model's parameters are froz"):
            pipeline.step(BATCH)
    with pytest.raises(ConfigError, match="nothing to train"):
        hocket.compile_step(net, loss, sgd, example=BATCH)
