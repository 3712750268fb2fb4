"""Plain attributes of modules that the loop changes between two steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from threading import local
from typing import Any, Final

import torch
from torch import Tensor, nn

from tests.conformance.script import Script, batches, case, chain, refused


class Warm(nn.Module):
    """Two layers; what the root's forward does between them, its attributes say."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.temperature = nn.Linear(6, 8), nn.Linear(8, 3), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) / self.temperature


@case(
    "a temperature in the root's forward",
    {"freeze": refused("the model's own forward is cut apart")},
)
def temperature() -> Script:
    """As a schedule anneals it."""

    def before_step(step: int, net: Any) -> None:
        net.temperature = 1 + step / 2

    return Script(Warm(), batches(), before_step=before_step, cut="b")


class Attends(nn.Module):
    """Attention, whose output lies in memory as its kernel leaves it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.qkv = nn.Linear(6, 8), nn.Linear(8, 24)
        self.last, self.temperature = nn.Linear(8, 3), 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))[:, None] * torch.arange(1, 5)[:, None]
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x.transpose(1, 2).contiguous().flatten(2)
        return self.last(x).mean(1) / self.temperature


@case(
    "a temperature in a root's forward that computes attention",
    {"freeze": refused("the model's own forward is cut apart")},
)
def attention_temperature() -> Script:
    """On `meta`, where there are no values, the kernel is another one."""

    def before_step(step: int, net: Any) -> None:
        net.temperature = 1 + step / 2

    return Script(Attends(), batches(), before_step=before_step, cut="last")


@case("the momentum of a BatchNorm")
def batchnorm_momentum() -> Script:
    """As nets for point clouds schedule it."""

    def before_step(step: int, net: Any) -> None:
        net[1].momentum = 0.1 / (step + 1)

    net = chain(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
    return Script(net, batches(), before_step=before_step)


@case("the rate of a Dropout, from 0 to 1")
def dropout_rate() -> Script:
    """At 0 and at 1 nothing is drawn."""

    def before_step(step: int, net: Any) -> None:
        net[1].p = float(step >= 2)

    net = chain(nn.Linear(6, 8), nn.Dropout(0.0), nn.Tanh())
    return Script(net, batches(), before_step=before_step)


@case("the slope of an activation")
def activation_slope() -> Script:
    """A number that a module of torch keeps."""

    def before_step(step: int, net: Any) -> None:
        net[1].negative_slope = 0.1 * step

    net = chain(nn.Linear(6, 8), nn.LeakyReLU(0.0), nn.Linear(8, 8), nn.Tanh())
    return Script(net, batches(), before_step=before_step)


class Typed(nn.Module):
    """Python compares 1, True and 1.0 as equal, and 0.0 and -0.0."""

    def __init__(self) -> None:
        super().__init__()
        self.rate: float = 1

    def forward(self, x: Tensor) -> Tensor:
        """What it computes differs for each."""
        kind = (int, bool, float).index(type(self.rate))
        return x * (kind + 1) + math.copysign(0.5, self.rate)


@case("an attribute whose type alone changes, or the sign of zero")
def type_alone() -> Script:
    """From 1 to True, 1.0, 0.0 and -0.0."""

    def before_step(step: int, net: Any) -> None:
        net[1].rate = (1, True, 1.0, 0.0, -0.0)[step % 5]

    net = chain(nn.Linear(6, 8), Typed(), nn.Tanh())
    return Script(net, batches(), before_step=before_step)


@dataclass
class Config:
    """Settings that several modules share."""

    scale: float = 1.0


class Scaled(nn.Module):
    """Multiplies by a number of its settings."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        return x * self.config.scale


@case("a settings object that modules share")
def shared_config() -> Script:
    """The loop changes the object, and no attribute of a module."""
    config = Config()

    def before_step(step: int, net: Any) -> None:
        config.scale = 1 + step / 2

    net = chain(nn.Linear(6, 8), Scaled(config), nn.Linear(8, 8), Scaled(config))
    return Script(net, batches(), before_step=before_step)


class Listed(nn.Module):
    """Multiplies by numbers in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [1.0, 1.0]
        self.by_name = {"gain": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales[0] * self.scales[1] * self.by_name["gain"]


@case("an entry of a list, and of a dict")
def entries() -> Script:
    """Changed in place: the attribute stays the same object."""

    def before_step(step: int, net: Any) -> None:
        net[1].scales[1] = 1 + step / 2
        net[1].by_name["gain"] = 1 / (1 + step)

    net = chain(nn.Linear(6, 8), Listed(), nn.Linear(8, 8), nn.Tanh())
    return Script(net, batches(), before_step=before_step)


class Branching(nn.Module):
    """Which way its forward goes, attributes of two modules say."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.skips = False
        self.activation: Any = torch.tanh
        self.b.gain = 1.0  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.a(x))
        x = x if self.skips else self.b(x) * self.b.gain
        return self.c(x) * getattr(self, "late", 1.0)


@case(
    "a flag that chooses a branch: a layer left out under way",
    {"freeze": refused("the model's own forward is cut apart")},
)
def flag() -> Script:
    """The layer gets no gradient any more."""

    def before_step(step: int, net: Any) -> None:
        net.skips = step >= 2

    return Script(Branching(), batches(), before_step=before_step, cut="c")


@case(
    "an attribute of a layer that the root's forward reads",
    {"freeze": refused("the model's own forward is cut apart")},
)
def read_by_another() -> Script:
    """The root's, of a module that is called beside it."""

    def before_step(step: int, net: Any) -> None:
        net.b.gain = 1 + step / 2

    return Script(Branching(), batches(), before_step=before_step, cut="c")


@case(
    "a function that a module keeps, exchanged",
    {"freeze": refused("the model's own forward is cut apart")},
)
def function_attribute() -> Script:
    """Tanh, then a rectifier."""

    def before_step(step: int, net: Any) -> None:
        net.activation = torch.tanh if step < 2 else torch.relu

    return Script(Branching(), batches(), before_step=before_step, cut="c")


@case(
    "an attribute that is first set under way",
    {"freeze": refused("the model's own forward is cut apart")},
)
def late_attribute() -> Script:
    """The forward asks for it with a default."""

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            net.late = 3.0

    return Script(Branching(), batches(), before_step=before_step, cut="c")


class Held(nn.Module):
    """Multiplies by a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones((), dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@case("a tensor attribute, changed in place")
def tensor_attribute_in_place() -> Script:
    """Neither a parameter nor a buffer."""

    def before_step(step: int, net: Any) -> None:
        net[1].scale.fill_(1 + step / 2)

    net = chain(nn.Linear(6, 8), Held(), nn.Linear(8, 8), nn.Tanh())
    return Script(net, batches(), before_step=before_step)


@case("a tensor attribute, replaced")
def tensor_attribute_replaced() -> Script:
    """The name gets another tensor."""

    def before_step(step: int, net: Any) -> None:
        net[1].scale = torch.full((), 1 + step / 2, dtype=torch.float64)

    net = chain(nn.Linear(6, 8), Held(), nn.Linear(8, 8), nn.Tanh())
    return Script(net, batches(), before_step=before_step)


class Counting(nn.Module):
    """Warms up: counts its own training forwards in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x * min(1.0, self.calls / 6)


@case(
    "a number that a forward itself counts up",
    {"wpipe 2bw": refused("1.calls")},
)
def counts_itself() -> Script:
    """From zero when training begins, as a loop without a pipeline has it."""

    def before_step(step: int, net: Any) -> None:
        if step == 0:
            net[1].calls = 0

    net = chain(nn.Linear(6, 8), Counting(), nn.Linear(8, 8), nn.Tanh())
    return Script(net, batches(), before_step=before_step)


class CountingRoot(nn.Module):
    """Warms up in the model's own code, between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 3)])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        y = self.layers[0](x)
        out: Tensor = self.layers[1](y if self.calls % 2 else y.tanh())
        return out


@case(
    "a number that a root's forward itself counts up",
    {
        "own-1 own-2 teacher freeze wpipe 2bw": refused("state in calls"),
    },
)
def root_counts_itself() -> Script:
    """No part of it can run the model's own code as it is, on two workers."""
    torch.manual_seed(0)
    return Script(CountingRoot(), batches(), cut="layers.1", layers="layers.*")


OF_THREAD: Final = local()
CONTEXT: Final = ContextVar("rate", default=1.0)


class Slotted:
    """A settings object without a dict."""

    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = 1.0


class Reads(nn.Module):
    """Its forward multiplies numbers that it finds in several kinds of objects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.slotted, self.last = Slotted(), deque([1.0], maxlen=1)
        self.scaled = partial(torch.mul, other=1.0)

    def forward(self, x: Tensor) -> Tensor:
        rate = self.slotted.rate * self.last[0] * OF_THREAD.rate * CONTEXT.get()
        return self.b(self.scaled(torch.tanh(self.a(x))) * rate)


def _changes(change: Callable[[Any, float], object]) -> Script:
    def before_step(step: int, net: Any) -> None:
        change(net, 1 + step / 2)

    OF_THREAD.rate = 1.0
    CONTEXT.set(1.0)
    return Script(Reads(), batches(), before_step=before_step, cut="b")


_IN_GLUE: Final = {"freeze": refused("the model's own forward")}


@case("an attribute in `__slots__`", _IN_GLUE)
def slotted() -> Script:
    """Of an object that has no dict."""
    return _changes(lambda net, rate: setattr(net.slotted, "rate", rate))


@case("the last entry of a deque", _IN_GLUE)
def in_deque() -> Script:
    """A new one pushes the old one out."""
    return _changes(lambda net, rate: net.last.append(rate))


@case("a keyword of a `functools.partial`", _IN_GLUE)
def in_partial() -> Script:
    """Changed in the dict that the partial has."""
    return _changes(lambda net, rate: net.scaled.keywords.update(other=rate))


@case("a thread's own attribute, and a context variable", _IN_GLUE)
def in_context() -> Script:
    """Set in the thread of the loop."""

    def change(net: Any, rate: float) -> None:
        OF_THREAD.rate = rate
        CONTEXT.set(rate)

    return _changes(change)
