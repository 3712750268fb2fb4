"""Losses that a pipeline would compute otherwise than the whole batch are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import ModelError
from hocket.model.trace.per_sample import PerSample, num_rows, take_rows
from hocket.run.data.loss import PerMicrobatch, losses_of
from tests.run.support.batch_losses import (
    CLASSES,
    NUM,
    labels,
    look,
    over_words,
    scores,
    words_of_uneven_sentences,
)

MEANS: Final[dict[str, tuple[Any, Any, Any]]] = {
    "cross entropy": (F.cross_entropy, scores(NUM, CLASSES), labels(NUM)),
    "of weighted classes": (
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0, 0.1, 3.0, 2.0])),
        scores(NUM, CLASSES),
        labels(NUM),
    ),
    "label smoothing": (
        nn.CrossEntropyLoss(label_smoothing=0.1),
        scores(NUM, CLASSES),
        labels(NUM),
    ),
    "over words, with padding": (
        over_words,
        scores(NUM, NUM, CLASSES),
        words_of_uneven_sentences(),
    ),
    "mixed classes": (
        F.cross_entropy,
        scores(NUM, CLASSES),
        scores(NUM, CLASSES).detach().softmax(-1),
    ),
    "squares": (F.mse_loss, scores(NUM, 3), torch.ones(NUM, 3)),
    "in half": (
        F.cross_entropy,
        scores(NUM, CLASSES).to(torch.bfloat16),
        labels(NUM),
    ),
    "distances between the outputs of a sample": (
        nn.CosineEmbeddingLoss(),
        (scores(NUM, 3), scores(NUM, 3) + 1),
        torch.ones(NUM),
    ),
    "of each sample's own": (
        lambda output, targets: torch.stack([x["x"].sum() for x in targets]).mean(),
        scores(NUM, 3),
        PerSample({"x": torch.ones(i)} for i in range(NUM)),
    ),
    "of what the model returned as its loss": (
        lambda output, targets: output["loss"],
        {"loss": scores(), "logits": scores(NUM, 3)},
        labels(NUM),
    ),
    "with a number beside": (
        lambda output, targets: F.cross_entropy(output[0] * output[1], targets),
        (scores(NUM, CLASSES), torch.tensor(2.0)),
        labels(NUM),
    ),
}


@pytest.mark.parametrize("name", MEANS)
def test_means_pass(name: str) -> None:
    """The check accepts means over samples and words, weighted or not.

    It accepts them for six samples, for one, and where the loss has a name.
    """
    loss, output, targets = MEANS[name]
    if name == "distances between the outputs of a sample":
        both = loss
        loss = lambda output, targets: both(*output, targets)  # noqa: E731
    look(loss, output, targets)
    look(lambda *given: {"total": loss(*given)}, output, targets)
    one, its_target = pytree.tree_map(first_row, (output, targets))
    look(loss, one, its_target, 1)


def first_row(leaf: Any) -> Any:
    """Take the first sample of a leaf that has six."""
    return take_rows(leaf, torch.arange(1)) if num_rows(leaf) == NUM else leaf


def clip(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """Each image against all texts of the batch, and the other way round."""
    image_BD, text_BD = (F.normalize(x, dim=-1) for x in output)
    score_BB = 10 * image_BD @ text_BD.T
    own = torch.arange(len(score_BB))
    return (F.cross_entropy(score_BB, own) + F.cross_entropy(score_BB.T, own)) / 2


def supervised_contrast(output: Tensor, targets: Tensor) -> Tensor:
    """Those of one class against all others (Khosla et al., arXiv:2004.11362)."""
    score_BB = F.normalize(output, dim=-1) @ F.normalize(output, dim=-1).T / 0.1
    is_other = ~torch.eye(len(output), dtype=torch.bool)
    alike = (targets[:, None] == targets) & is_other
    log_BB = score_BB - score_BB.masked_fill(~is_other, -1e9).logsumexp(1, keepdim=True)
    return -(log_BB * alike).sum() / alike.sum().clamp(min=1)


def spread(output: Tensor, targets: Tensor) -> Tensor:
    """VICReg's, which wants features that differ (arXiv:2105.04906)."""
    return F.relu(1 - output.std(0)).mean() + F.mse_loss(output, targets)


def pairs(output: Tensor, targets: Tensor) -> Tensor:
    """The score of each positive sample shall be above that of each negative."""
    is_positive = targets[:, None] > targets
    gap_BB = output[:, 0][:, None] - output[:, 0]
    return (F.softplus(-gap_BB) * is_positive).sum() / len(output)


COMPARING: Final[dict[str, tuple[Any, Any, Any]]] = {
    "clip": (clip, (scores(NUM, 8), scores(NUM, 8) + 0.3), labels(NUM)),
    "supervised contrast": (
        supervised_contrast,
        scores(NUM, 8),
        torch.tensor([0, 1, 0, 1, 0, 1]),
    ),
    "spread": (spread, 0.1 * scores(NUM, 3), torch.ones(NUM, 3)),
    "pairs": (pairs, scores(NUM, 1), torch.tensor([0, 1, 0, 1, 0, 1])),
}


@pytest.mark.parametrize("name", COMPARING)
def test_losses_that_compare_samples_are_refused(name: str) -> None:
    """With both numbers, and three ways out, of which the last one works."""
    loss, output, targets = COMPARING[name]
    with pytest.raises(ModelError) as raised:
        look(loss, output, targets)
    text = str(raised.value)
    assert "of 4 samples is" in text
    assert "of the same 4 samples twice" in text
    assert "compares samples with each other" in text
    for way in ("Return the mean", "num_microbatches=1", "hocket.PerMicrobatch(loss)"):
        assert way in text
    look(PerMicrobatch(loss), output, targets)
    assert torch.equal(
        losses_of(PerMicrobatch(loss), output, targets)["loss"], loss(output, targets)
    )


def test_one_sample_is_enough() -> None:
    """Microbatches of one: against no other sample, against itself."""
    output = (scores(1, 8), scores(1, 8) + 0.3)
    with pytest.raises(ModelError, match="of 1 sample is 0, and of the same 1 sample"):
        look(clip, output, labels(1), 1)
    look(F.cross_entropy, scores(1, CLASSES), labels(1), 1)


def test_sums_are_refused() -> None:
    """What would be trained depended on the number of microbatches."""
    with pytest.raises(ModelError, match=r"it is a sum over samples, or compares"):
        look(nn.CrossEntropyLoss(reduction="sum"), scores(NUM, CLASSES), labels(NUM))


class Queue(nn.Module):
    """Compares with the samples of the batches before (MoCo)."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.ones(2, 3))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        value = (output @ self.last.T).exp().mean()
        self.last.copy_(output[:2].detach())
        return value


def _fixed(output: Tensor, targets: Tensor) -> Tensor:
    """Knows its batch size, and compares all the same."""
    return clip((output.view(NUM, 2, 4)[:, 0], output.view(NUM, 2, 4)[:, 1]), targets)


UNTOLD: Final[dict[str, tuple[Callable[..., Any], Any, Any]]] = {
    "draws random numbers": (
        lambda output, targets: F.mse_loss(output + torch.randn_like(output), targets),
        scores(NUM, 3),
        torch.ones(NUM, 3),
    ),
    "keeps something of the last batch": (Queue(), scores(NUM, 3), labels(NUM)),
    "another first dimension": (
        lambda output, targets: F.cross_entropy(
            output.flatten(0, 1), targets.flatten()
        ),
        scores(3, NUM, CLASSES),
        labels(NUM, 3),
    ),
    "a size of its own": (_fixed, scores(NUM, 8), labels(NUM)),
    "not finite": (
        lambda output, targets: output.std(0).mean() / 0.0,
        scores(NUM, 3),
        labels(NUM),
    ),
    "nothing per sample": (
        lambda output, targets: output["loss"],
        {"loss": scores()},
        labels(NUM),
    ),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_what_cannot_be_tried_is_not_judged(name: str) -> None:
    """The check accepts losses that it cannot try; some of them compare samples."""
    look(*UNTOLD[name])


def test_outputs_by_time_are_not_mistaken() -> None:
    """The check accepts a mean whose output has as many words as samples, words first.

    Its first dimension looks like the samples. The check reverses it, and finds that it
    is not, since the loss changes.
    """

    def loss(score_TBV: Tensor, word_BT: Tensor) -> Tensor:
        return F.cross_entropy(
            score_TBV.transpose(0, 1).flatten(0, 1), word_BT.flatten()
        )

    look(loss, scores(4, 4, CLASSES), labels(4, 4), 4)


def test_leaves_no_trace() -> None:
    """The check restores the random numbers and what the loss keeps on itself."""
    queue = Queue()
    random, last = torch.get_rng_state(), queue.last.clone()
    calls = itertools.count()

    def loss(output: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        next(calls)
        return {"loss": F.mse_loss(output, targets), "noise": torch.rand(())}

    look(loss, scores(NUM, 3), torch.ones(NUM, 3))
    look(queue, scores(NUM, 3), labels(NUM))
    assert next(calls) == 3
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(queue.last, last)
