"""What layers hand on beside their outputs, and parameters among the outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.conformance.script import (
    PIPELINES,
    Script,
    batches,
    case,
    chain,
    mse,
    refused,
)


class ReturnsLast(nn.Module):
    """Returns a weight beside its output, for a penalty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.b(torch.tanh(self.a(x))), self.b.weight


class ReturnsFirst(ReturnsLast):
    """Returns the weight of its first layer."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.b(torch.tanh(self.a(x))), self.a.weight


def _penalised(output: Any, targets: Tensor) -> Tensor:
    return mse(output[0], targets) + 0.01 * output[1].square().sum()


@case(
    "a parameter of the last layer among the outputs",
    {"2bw": refused("the loss reads b.weight")},
)
def returned_parameter() -> Script:
    """The loss has a penalty of it."""
    return Script(ReturnsLast(), batches(), loss=_penalised, cut="b")


@case(
    "a parameter of the first layer among the outputs",
    {
        "freeze": refused("a.weight is used by a and by b"),
        "wpipe 2bw": refused("the loss reads a.weight"),
    },
)
def returned_first() -> Script:
    """The last stage reads it, too."""
    return Script(ReturnsFirst(), batches(), loss=_penalised, cut="b")


class Keeps(nn.Linear):
    """Keeps its output in a dict or a list, for a later layer."""

    def __init__(self, kept: Any, *, detaches: bool = False) -> None:
        super().__init__(6, 8)
        self.kept, self.detaches = kept, detaches

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        skip = found.detach() if self.detaches else found
        if isinstance(self.kept, list):
            self.kept.append(skip)
        else:
            self.kept["skip"] = skip
        return found


class Takes(nn.Module):
    """Adds what an earlier layer has kept."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        is_list = isinstance(self.kept, list)
        found: Tensor = self.kept.pop() if is_list else self.kept["skip"]
        return x + found


def _skip(kept: Any, **options: Any) -> Script:
    first = Keeps(kept, **options)
    net = chain(first, nn.Tanh(), nn.Linear(8, 8), Takes(kept))
    return Script(net, batches(), cut="2")


@case(
    "a skip through a dict that two layers share",
    {PIPELINES: refused("It keeps 0.kept, 3.kept from one forward to the next")},
)
def skip_by_dict() -> Script:
    """With its gradient."""
    return _skip({})


@case(
    "a skip through a list that two layers share",
    {
        "seq-1 seq-2": refused("reads what another one has kept"),
        "freeze": refused("cut points must follow the order of the model"),
    },
)
def skip_by_list() -> Script:
    """The later layer takes it out again."""
    return _skip([])


@case(
    "a detached skip through a dict that two layers share",
    {
        "own-1 own-2 seq-2 teacher freeze wpipe 2bw": refused(
            "reads what another one has kept"
        )
    },
)
def detached_skip() -> Script:
    """Without a gradient."""
    return _skip({}, detaches=True)


@case(
    "a detached skip, where the loop has called the model before",
    {
        "own-2 wpipe": refused("each forward changes 0.kept"),
        "seq-2": refused("3 reads 0.kept, which each forward changes"),
        "freeze": refused("cut points must follow the order of the model"),
    },
)
def stale_skip() -> Script:
    """Another stage would find what that call has left."""
    script = _skip({}, detaches=True)
    script.net(script.batches[0][0][:4])
    return script


class KeepsFeature(nn.Linear):
    """Keeps its output as an attribute."""

    feature: Tensor

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        self.feature = found.detach()
        return found


class TakesFeature(nn.Module):
    """Reads the feature of another layer, which is no child of it."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = (other,)

    def forward(self, x: Tensor) -> Tensor:
        other: Any = self.other[0]
        found: Tensor = x + other.feature
        return found


@case(
    "a feature that a layer keeps, where the loop has called the model before",
    {
        "own-1 teacher 2bw": refused("plain attribute self.0.feature"),
        "own-2 seq-2 wpipe": refused("3 reads 0.feature, which each forward changes"),
        "freeze": refused("0.weight is used by 0 and by 3"),
    },
)
def stale_feature() -> Script:
    """Another stage would find what that call has left."""
    first = KeepsFeature(6, 8)
    net = chain(first, nn.Tanh(), nn.Linear(8, 8), TakesFeature(first))
    script = Script(net, batches(), cut="2")
    script.net(script.batches[0][0][:4])
    return script
