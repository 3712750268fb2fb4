"""Networks with one peculiarity each."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.run.support.small_models import Residual, Specimen, classes


class Frozen(nn.Module):
    """The beginning is not trained, but its batch norm still counts what it sees."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.early = nn.ModuleList(Residual(width, 0.0) for _ in range(4))
        self.late = nn.ModuleList(Residual(width, 0.0) for _ in range(2))
        self.head = nn.Linear(width, 3)
        for part in (self.stem, self.norm, self.early):
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        for layer in (*self.early, *self.late):
            x = layer(x)
        return cast(Tensor, self.head(x))


class MixedTypes(nn.Module):
    """Embeddings in float32, the middle in bfloat16, the end in float64."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        early = [Residual(width, 0.0) for _ in range(2)]
        self.early = nn.ModuleList(early).bfloat16()
        late = [Residual(width, 0.0) for _ in range(2)]
        self.late = nn.ModuleList(late).double()
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).mean(1).bfloat16()
        for layer in self.early:
            x = layer(x)
        x = x.double()
        for layer in self.late:
            x = layer(x)
        return cast(Tensor, self.head(x.float()))


class Outputs(NamedTuple):
    """What `Nested` returns."""

    logits: Tensor
    rest: dict[str, Any]


class Nested(nn.Module):
    """Nested arguments, some of them no tensors; outputs from every depth.

    One parameter is never used, and one only when an argument says so.
    """

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(width, 0.0) for _ in range(5))
        self.scale = nn.Parameter(torch.ones(width))
        self.sometimes = nn.Parameter(torch.ones(width))
        self.never = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(width, 3)

    def forward(
        self,
        x: Tensor,
        more: tuple[Tensor, dict[str, Tensor]],
        *,
        factor: float,
        names: list[str],
        use: bool = True,
    ) -> Outputs:
        hidden: list[Tensor] = []
        for name, layer in zip(names, self.layers, strict=True):
            x = layer(x) * factor
            if name == "add":
                x = x + more[0] * self.scale
            hidden.append(x)
        x = x + more[1]["late"] if use else x * self.sometimes
        return Outputs(self.head(x), {"hidden": hidden, "name": names[0]})


class LooksAtData(nn.Module):
    """Sends each sample the way that its numbers say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor, gate: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        ways = [self.up if row.sum().item() > 0 else self.down for row in x]
        rows = [way(row) for way, row in zip(ways, x, strict=True)]
        return torch.tanh(torch.stack(rows)), {"gate": gate.square()}


class End(nn.Module):
    """Adds a skip from the first submodule, and one from the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, *, skip: Tensor, gates: list[Tensor]) -> Tensor:
        return cast(Tensor, self.head(x + skip + torch.stack(gates).sum(0)[:, None]))


class Branching(nn.Module):
    """Cannot be captured; its own code does nothing but hand tensors on."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.begin = nn.Linear(width, width)
        self.blocks = nn.ModuleList(LooksAtData(width) for _ in range(3))
        self.end = End(width)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        skip = x = self.begin(x)
        gates = [gate]
        for block in self.blocks:
            x, more = block(x, gate)
            gates.append(more["gate"])
        return cast(Tensor, self.end(x, skip=skip, gates=gates))


def nested_loss(output: Outputs, targets: Tensor) -> dict[str, Tensor]:
    """Of the logits, and of what the layers made."""
    size = sum(x.square().mean() for x in output.rest["hidden"])
    assert isinstance(size, Tensor)
    return {"class": F.cross_entropy(output.logits, targets), "size": 1e-3 * size}


def _vectors(count: int, rng: torch.Generator) -> Tensor:
    return torch.randn(count, 6, generator=rng, dtype=torch.float64)


def _labels(count: int, rng: torch.Generator) -> Tensor:
    return torch.randint(3, (count,), generator=rng)


def _plain(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    return _vectors(count, rng), _labels(count, rng)


def _tokens(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    return torch.randint(11, (count, 5), generator=rng), _labels(count, rng)


def _nested(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    more = (_vectors(count, rng), {"late": _vectors(count, rng)})
    names = ["first", "add", "plain", "add", "last"]
    inputs = {"x": _vectors(count, rng), "more": more, "factor": 0.5, "names": names}
    return inputs, _labels(count, rng)


def _gated(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    gate = torch.rand(count, generator=rng, dtype=torch.float64)
    return (_vectors(count, rng), gate), _labels(count, rng)


ODD = {
    "frozen": Specimen(
        Frozen,
        classes,
        _plain,
        cuts={
            2: ("late.0",),
            3: ("early.2", "late.0"),
            4: ("early.1", "early.3", "late.0"),
        },
    ),
    "mixed-types": Specimen(MixedTypes, classes, _tokens, is_double=False),
    "nested": Specimen(Nested, nested_loss, _nested),
    "branching": Specimen(
        Branching,
        classes,
        _gated,
        cuts={
            2: ("blocks.1",),
            3: ("blocks.0", "blocks.2"),
            4: ("blocks.0", "blocks.1", "end"),
        },
    ),
}
