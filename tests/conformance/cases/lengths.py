"""Batches whose samples have another length, or another size, than the example's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import hocket
from tests.conformance.cases.inputs import Mixes, Tokens
from tests.conformance.script import (
    Script,
    Verdict,
    batches,
    case,
    chain,
    refused,
    unsuited,
)

_FREEZES = refused("only the number of samples may change")


def _texts() -> Iterator[tuple[Tensor, Tensor]]:
    """As loaders pad to the longest of a batch."""
    rng = torch.Generator().manual_seed(3)
    for i, (_, y) in enumerate(batches()):
        yield torch.randint(11, (8, 5 + i), generator=rng), y


@case("texts of another length in each batch", {"freeze": _FREEZES})
def text_lengths() -> Script:
    """A root that computes between its modules."""
    return Script(Tokens(), [*_texts()], cut="head")


class Padded(nn.Module):
    """Makes positions and a causal mask of the length, and leaves padding out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(16, 8)
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        length = words.shape[1]
        x = self.words(words) + self.places(torch.arange(length))
        causal = torch.ones(length, length, dtype=x.dtype).tril()
        x = self.mix(x) * mask[..., None]
        y = torch.einsum("bsd,ts->btd", x, causal) / length
        return self.head(torch.tanh(y)).sum(1) / mask.sum(1, keepdim=True)


@case(
    "texts and their padding masks, of another length in each batch",
    {"freeze": _FREEZES},
)
def padded() -> Script:
    """Constants of the graph follow from the length."""
    data = []
    for words, y in _texts():
        mask = (
            torch.arange(words.shape[1]) < 3 + torch.arange(8)[:, None] % 3
        ).double()
        data.append(({"words": words, "mask": mask}, y))
    return Script(Padded(), data, cut="head")


@case("images of another size in each batch", {"freeze": _FREEZES})
def image_sizes() -> Script:
    """Convolutions, and a mean over all places."""
    torch.manual_seed(0)
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), *pool, nn.Linear(16, 3)
    )
    rng = torch.Generator().manual_seed(3)
    data = [
        (torch.randn(8, 3, 7 + i, 9 - i, generator=rng, dtype=torch.float64), y)
        for i, (_, y) in enumerate(batches())
    ]
    return Script(net, data, cut="4")


@case(
    "a (T, T) mask declared as `Shared`, of another T in each batch",
    {"freeze": _FREEZES},
)
def shared_lengths() -> Script:
    """Without dimension of samples."""
    rng = torch.Generator().manual_seed(3)
    data = []
    for length in (6, 8, 5, 7):
        mask = hocket.Shared(torch.ones(length, length, dtype=torch.float64).tril())
        x, y = (
            torch.randn(8, length, n, generator=rng, dtype=torch.float64)
            for n in (4, 3)
        )
        data.append(((x, mask), y))
    return Script(Mixes(), data, cut="b")


class Last(nn.Module):
    """What an LSTM returns for the last word."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)[0][:, -1]
        return out


@case(
    "texts of another length through an LSTM",
    {
        "freeze": _FREEZES,
    },
)
def lstm_lengths() -> Script:
    """Whose graph is one of so many words."""
    torch.manual_seed(0)
    return Script(
        nn.Sequential(nn.Embedding(11, 8), Last(), nn.Linear(8, 3)),
        [*_texts()],
        cut="2",
    )


class Decides(Tokens):
    """Computes something else for long texts."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if x.shape[1] > 6 else y


@case(
    "a forward that does something else with long texts",
    {
        "freeze": _FREEZES,
    },
)
def decides_by_length() -> Script:
    """A graph has one of both."""
    return Script(Decides(), [*_texts()], cut="head")


class Small(nn.Module):
    """Computes something else for few samples."""

    most = 2

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        return self.b(y * 2 if x.shape[0] <= self.most else y)


class One(Small):
    """Asks whether there is one sample, as code does that repeats what it has."""

    most = 1


class Repeats(Small):
    """Does for one sample what it does for all: a view of all is no change."""

    def forward(self, x: Tensor) -> Tensor:
        row = self.a.bias[None]
        if x.shape[0] != row.shape[0]:
            row = row.expand(x.shape[0], -1)
        return self.b(torch.tanh(self.a(x) + row))


class Most(Small):
    """Computes something else for more samples than there ever are."""

    most = 100

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        return self.b(y * 2 if x.shape[0] > 8 else y)


def _sizes(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    return [(x[:n], y[:n]) for n, (x, y) in zip(sizes, batches(), strict=True)]


def _by_samples(text: str) -> dict[str, Verdict]:
    return {"own-1 own-2 teacher freeze wpipe 2bw": refused(text)}


@case(
    "a forward that does something else with few samples, of which the last batch has",
    _by_samples("decides by the number (num_samples > 2)"),
)
def few_samples() -> Script:
    """Microbatches of 4, 4, 3 and 2."""
    return Script(Small(), _sizes(8, 8, 6, 4), cut="b")


@case(
    "a forward that does something else with one sample, and a microbatch of one",
    _by_samples("decides by the number (num_samples > 1)"),
)
def one_sample() -> Script:
    """torch.export takes for granted that there are more."""
    return Script(One(), _sizes(8, 8, 6, 2), cut="b")


@case(
    "a forward that repeats a row unless there is one sample, and a microbatch of one"
)
def repeated_row() -> Script:
    """The operators are the same ones."""
    return Script(Repeats(), _sizes(8, 8, 6, 2), cut="b")


@case("a forward that does something else with more samples than any microbatch has")
def many_samples() -> Script:
    """More than 8, and it is exported with 13 at first."""
    return Script(Most(), _sizes(8, 8, 6, 4), cut="b")


@case(
    "a BatchNorm of vectors that gets one sample",
    {
        "seq-1 seq-2": unsuited("torch raises an error"),
        **_by_samples("by the number (num_samples != 1)"),
    },
)
def one_value() -> Script:
    """torch refuses that, and so does the plain loop."""
    net = chain(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
    return Script(net, _sizes(8, 8, 6, 2))
