"""A loss that is no mean of its parts is found by its gradients, whatever the value.

The check exchanges the other samples of a batch, and their number: in a mean of
samples, weighted or not, this only rescales the gradient of each sample.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hocket.errors import ModelError
from hocket.run.data.loss import PerMicrobatch
from tests.run.support.batch_losses import (
    CLASSES,
    NUM,
    labels,
    look,
    over_words,
    scores,
    words_of_uneven_sentences,
)


def batch_hard(output: Tensor, targets: Tensor) -> Tensor:
    """Each sample's furthest of its class and nearest of another (1703.07737)."""
    far_BB = torch.cdist(output, output)
    alike = targets[:, None] == targets
    positive = (far_BB * alike).amax(1)
    negative = far_BB.masked_fill(alike, 1e9).amin(1)
    return F.relu(positive - negative + 1.0).mean()


def barlow_twins(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """The correlation of features over the batch (arXiv:2103.03230)."""
    a, b = ((x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-6) for x in output)
    c_DD = a.T @ b / len(a)
    return (c_DD - torch.eye(len(c_DD))).square().sum()


def root(output: Tensor, targets: Tensor) -> Tensor:
    """The root of a mean square."""
    return F.mse_loss(output, targets).sqrt()


def dice(output: Tensor, targets: Tensor) -> Tensor:
    """The overlap over all samples together."""
    p = output.sigmoid()
    return 1 - 2 * (p * targets).sum() / (p.sum() + targets.sum())


def correlation(output: Tensor, targets: Tensor) -> Tensor:
    """Pearson's, between scores and values."""
    x, y = output - output.mean(), targets - targets.mean()
    return 1 - (x * y).sum() / (x.norm() * y.norm())


PASSED_BEFORE: Final[dict[str, tuple[Any, Any, Any]]] = {
    "batch-hard triplets": (
        batch_hard,
        scores(NUM, 3),
        torch.tensor([0, 1, 0, 1, 0, 1]),
    ),
    "Barlow Twins": (barlow_twins, (scores(NUM, 3), scores(NUM, 3) + 0.3), labels(NUM)),
    "root of a mean": (root, scores(NUM, 3), torch.ones(NUM, 3)),
    "logarithm of a mean": (
        lambda output, targets: F.mse_loss(output, targets).log(),
        scores(NUM, 3),
        torch.ones(NUM, 3),
    ),
    "perplexity": (
        lambda output, targets: F.cross_entropy(output, targets).exp(),
        scores(NUM, CLASSES),
        labels(NUM),
    ),
    "dice over the batch": (dice, scores(NUM, 4), (scores(NUM, 4) > 0).float()),
    "correlation": (correlation, scores(NUM, 1), torch.arange(6.0)[:, None]),
    "variance over the batch": (
        lambda output, targets: output.var(0, unbiased=False).sum(),
        scores(NUM, 3),
        labels(NUM),
    ),
    "weights from the outputs": (
        lambda output, targets: (output.softmax(0) * (output - targets) ** 2).sum(),
        scores(NUM, 3),
        torch.ones(NUM, 3),
    ),
}


@pytest.mark.parametrize("name", PASSED_BEFORE)
def test_other_samples_only_rescale_a_gradient(name: str) -> None:
    """All samples twice leave these as they are; a pipeline trains other weights."""
    loss, output, targets = PASSED_BEFORE[name]
    with pytest.raises(ModelError, match="by its gradients it is no mean of both"):
        look(loss, output, targets)
    look(PerMicrobatch(loss), output, targets)


@given(
    num=st.integers(2, 9),
    num_classes=st.integers(2, 4),
    seed=st.integers(0, 2**32 - 1),
    form=st.sampled_from(["plain", "weights", "padding", "smoothing", "hinge", "two"]),
)
def test_weighted_means_pass_whatever_the_numbers(
    num: int, num_classes: int, seed: int, form: str
) -> None:
    """Weights of any size, samples without words, gradients that are zero."""
    rng = torch.Generator().manual_seed(seed)
    output = torch.randn(num, 3, num_classes, generator=rng) * 3
    targets = torch.randint(num_classes, (num, 3), generator=rng)
    weights = torch.rand(num_classes, generator=rng) * 10

    def loss(score_BTC: Tensor, class_BT: Tensor) -> Tensor:
        score_NC, class_N = score_BTC.flatten(0, 1), class_BT.flatten()
        match form:
            case "weights":
                return F.cross_entropy(score_NC, class_N, weight=weights)
            case "padding":
                return F.cross_entropy(score_NC, class_N, ignore_index=0)
            case "smoothing":
                return F.cross_entropy(score_NC, class_N, weights, label_smoothing=0.3)
            case "hinge":
                return F.multi_margin_loss(score_NC, class_N)
            case "two":
                return F.cross_entropy(score_NC, class_N) + score_BTC.square().mean()
            case _:
                return F.cross_entropy(score_NC, class_N)

    look(loss, output, targets, num)


def test_two_means_with_weights_of_their_own_pass() -> None:
    """Masked words, and one class per sentence: as BERT is trained."""

    def loss(output: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
        return over_words(output[0], targets[0]) + F.cross_entropy(
            output[1], targets[1]
        )

    given = (scores(NUM, NUM, CLASSES), scores(NUM, CLASSES))
    look(loss, given, (words_of_uneven_sentences(), labels(NUM)))
