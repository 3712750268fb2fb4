"""Models whose buffers or strides are unusual, beside the plain loop over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

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


CASES: Final[dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]]] = {
    made.__name__: made for made in (buffers, channels_last, transposed)
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
        net,
        loss,
        SGD,
        batches[0],
        num_microbatches=4,
        run_dir=folder,
        **options or {},
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
