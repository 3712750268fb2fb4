"""Activations are compared between samples, wherever a model has their dimension."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.errors import ConfigError
from hocket.freeze import Plasticity
from hocket.model.trace.value import SentTensor
from hocket.run.elastic.make import sample_dimension
from tests.run.support.started import started

POLICY = Plasticity(every_steps=1, window=2, patience=1, tolerance=0.9)
NUM_SAMPLES = 4  # of a microbatch


class Encoder(nn.Module):
    """Three of torch's layers, which take tokens first unless it is said otherwise."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embedding = nn.Linear(3, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """From x_BTW to logits_BC."""
        hidden = self.embedding(x)
        if self.batch_first:
            mixed: Tensor = self.encoder(hidden)
            return self.head(mixed.mean(1))
        return self.head(self.encoder(hidden.transpose(0, 1)).mean(0))


class Flat(nn.Module):
    """Blocks that see tokens only, whatever sample they are of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        """From x_BTW to logits_BC."""
        hidden = x.flatten(0, 1)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.head(hidden.unflatten(0, (-1, x.shape[1])).mean(1))


def make_pipeline(model: nn.Module, batch: object, folder: Path) -> hocket.Pipeline:
    """On one worker, with two microbatches."""
    return started(
        model,
        F.cross_entropy,
        partial(torch.optim.SGD, lr=0.1),
        batch,
        freeze=POLICY,
        run_dir=folder,
    )


def make_batch(num_tokens: int) -> tuple[Tensor, Tensor]:
    """The same each time."""
    rng = torch.Generator().manual_seed(1)
    size = 2 * NUM_SAMPLES
    inputs = torch.randn(size, num_tokens, 3, generator=rng, dtype=torch.float64)
    return inputs, torch.randint(4, (size,), generator=rng)


@pytest.mark.parametrize("num_tokens", [NUM_SAMPLES, NUM_SAMPLES + 1])
def test_tokens_may_come_first(tmp_path: Path, num_tokens: int) -> None:
    """Past bug: with as many tokens as samples, tokens were compared; else it crashed.

    The same model with samples first measures the same, and freezes as many layers.
    """
    batch = make_batch(num_tokens)
    distances, frozen = [], []
    for batch_first in (True, False):
        torch.manual_seed(0)
        model = Encoder(batch_first=batch_first).double()
        with make_pipeline(model, batch, tmp_path) as pipeline:
            freezing = pipeline._freezing
            assert freezing is not None
            pipeline.step(batch)
            played = pipeline._saved.played
            distances.append(freezing._measure.take(played, batch))
            frozen.append([pipeline.step(batch).num_frozen for _ in range(5)])
    assert all(distances[0])
    assert distances[1] == pytest.approx(distances[0], rel=1e-6)
    assert frozen[1] == frozen[0]
    assert any(frozen[0])


def test_refuses_activations_that_are_of_no_one_sample(tmp_path: Path) -> None:
    """When the pipeline is made: past bug, it crashed at the first decision."""
    why = r"samples behind blocks\.0, where no dimension is known to be the 4 samples"
    with pytest.raises(ConfigError, match=rf"{why} .*\(20, 3\)\. Name other layers"):
        make_pipeline(Flat().double(), make_batch(5), tmp_path)


@pytest.mark.parametrize(
    ("shape", "per_sample", "is_fixed", "expected"),
    [
        ((4, 5, 8), (1, 0, 0), False, 0),
        ((5, 4, 8), (0, 1, 0), False, 1),
        ((4, 4, 8), (0, 1, 0), False, 1),
        ((20, 8), (5, 0), False, None),  # samples or tokens first: not known
        ((5, 8), (1, 0), False, None),  # with a row that is of none
        ((4, 4), (1, 1), False, None),  # of pairs of samples
        ((4, 8), (0, 0), False, None),  # the same for all, by chance of that length
        ((), (), False, None),
        ((5, 4, 8), (0, 0, 0), True, 1),
        ((4, 4, 8), (0, 0, 0), True, None),
        ((5, 8), (0, 0), True, None),
    ],
)
def test_the_dimension_of_samples(
    shape: tuple[int, ...],
    per_sample: tuple[int, ...],
    is_fixed: bool,
    expected: int | None,
) -> None:
    """It grows by one with each sample; where growth is not known, it must be clear."""
    value = SentTensor("x", shape, per_sample, 4, torch.float32, requires_grad=True)
    assert sample_dimension(value, is_fixed=is_fixed) == expected
    whole = SentTensor("x", shape, per_sample, 4, torch.int64, requires_grad=False)
    assert sample_dimension(whole, is_fixed=is_fixed) is None
