"""Pipelines with a mean over counted targets, on any number of workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.run.cluster.world import join_world
from hocket.run.data.loss import named_losses
from hocket.run.data.sample_loader import EvaluationLoader
from hocket.run.data.step_batch import grouped
from tests.run.support.concatenated_batches import ConcatenatedBatches
from tests.run.support.started import started
from tests.run.support.whole_batch_workers import sums_of

NUM_STEPS: Final = 20
NUM_SAMPLES: Final = 12
NUM_WORDS: Final = 5
NUM_CLASSES: Final = 4
PADDING: Final = 0
FEW, NONE = 2, 3  # the steps in which one sample, and no sample, has words


def make_model() -> nn.Module:
    """Scores of classes for each word."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8),
        *(layer for _ in range(4) for layer in (nn.Tanh(), nn.Linear(8, 8))),
        nn.Linear(8, NUM_CLASSES),
    ).double()


def data() -> list[tuple[Tensor, Tensor]]:
    """Batches of sentences of 0 to 5 words; the last one is smaller."""
    rng = torch.Generator().manual_seed(1)
    found = []
    for step in range(NUM_STEPS):
        size = NUM_SAMPLES - 2 * (step == NUM_STEPS - 1)
        word_NW = torch.randint(1, NUM_CLASSES, (size, NUM_WORDS), generator=rng)
        length_N = torch.randint(NUM_WORDS + 1, (size,), generator=rng)
        if step in (FEW, NONE):
            length_N[step == FEW :] = 0
        word_NW[torch.arange(NUM_WORDS) >= length_N[:, None]] = PADDING
        found.append((torch.randn(size, NUM_WORDS, 6, generator=rng).double(), word_NW))
    return found


class OverWords(nn.CrossEntropyLoss):
    """torch's loss, with the words of all sentences in a row."""

    def forward(self, score_NWC: Tensor, word_NW: Tensor) -> Tensor:
        """The mean over words that are no padding."""
        return super().forward(score_NWC.flatten(0, 1), word_NW.flatten())


def over_words(score_NWC: Tensor, word_NW: Tensor) -> dict[str, Tensor]:
    """Return a mean over words by hand, and the share of words that are right."""
    kept = word_NW != PADDING
    each = F.cross_entropy(score_NWC.transpose(1, 2), word_NW, reduction="none")
    right = score_NWC.argmax(-1) == word_NW
    count = kept.sum()
    return {
        "loss": (each * kept).sum() / count,
        "right": (right & kept).sum() / count.double(),
    }


def num_words(word_NW: Tensor) -> Tensor:
    """Return the number of words that are no padding."""
    return (word_NW != PADDING).sum()


LOSSES: Final[dict[str, Callable[[], hocket.TokenMean]]] = {
    "ignore_index": lambda: hocket.TokenMean(OverWords(ignore_index=PADDING)),
    "class weights": lambda: hocket.TokenMean(
        OverWords(
            weight=torch.tensor([1.0, 9.0, 0.1, 3.0]).double(), ignore_index=PADDING
        )
    ),
    "counted by hand": lambda: hocket.TokenMean(over_words, count=num_words),
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Make an optimizer that is sensitive to small differences."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def pipeline(loss: Any, **settings: Any) -> hocket.Pipeline:
    """Three microbatches in 1F1B, or what the settings say."""
    return started(
        make_model(),
        loss,
        adamw,
        data()[0],
        **{"schedule": "1f1b", "num_microbatches": 3, **settings},
    )


def train(
    name: str, settings: dict[str, Any], reads: str = "batches"
) -> dict[str, Any]:
    """Train all steps; return losses, an evaluation, and a sum of each weight.

    Args:
        name: of the loss.
        settings: of the pipeline.
        reads: what each worker reads: whole "batches", or the "parts" that it needs.
    """
    torch.set_num_threads(1)
    whole = data()
    with pipeline(LOSSES[name](), world=join_world(), **settings) as trained:
        batches: Any = (
            EvaluationLoader(ConcatenatedBatches(data()), NUM_SAMPLES)
            if reads == "parts"
            else whole
        )
        losses = [result.losses for result in trained.train(batches)]
        weights = sums_of(trained.state_dict())
        evaluated = trained.evaluate(batches).losses
        empty = trained.evaluate([whole[NONE]]).losses
        cut_at = list(trained.plan.stage_names[1:])
    return {
        "losses": losses,
        "weights": weights,
        "evaluated": evaluated,
        "of nothing": empty,
        "cut at": cut_at,
    }


def train_inexactly(settings: dict[str, Any]) -> None:
    """Train with a loss that is not exact."""
    torch.set_num_threads(1)
    loss = OverWords(weight=torch.tensor([1.0, 9.0, 0.1, 3.0]).double())
    with pipeline(loss, world=join_world(), **settings) as trained:
        trained.step(data()[0])


def train_plainly(
    name: str, accumulate: int = 1, clip_norm: float = math.inf
) -> dict[str, Any]:
    """The same over whole batches, without a pipeline."""
    loss, model = LOSSES[name](), make_model()
    optimizer = adamw(model.parameters())
    losses = []
    for group in grouped(data(), accumulate):
        inputs, targets = map(torch.cat, zip(*group, strict=True))
        named = named_losses(loss(model(inputs), targets))
        optimizer.zero_grad()
        named["loss"].backward()
        if not num_words(targets):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append({key: value.nan_to_num().item() for key, value in named.items()})
    return {"losses": losses, "weights": sums_of(model.state_dict())} | {
        "evaluated": evaluate_plainly(name, model)
    }


def evaluate_plainly(name: str, model: nn.Module) -> dict[str, float]:
    """The loss of all data at once."""
    inputs, targets = map(torch.cat, zip(*data(), strict=True))
    with torch.no_grad():
        named = named_losses(LOSSES[name]()(model(inputs), targets))
    return {key: value.item() for key, value in named.items()}
