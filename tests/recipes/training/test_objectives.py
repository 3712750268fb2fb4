"""Losses and metrics are means over samples, which no cut of the batch changes."""

from __future__ import annotations

from math import isclose, log

import pytest
import torch
from torch import Tensor

from hocket.errors import DataError
from hocket.recipes.training.objectives import Sentences, class_loss, class_metrics

PAD = 0


def sentences() -> tuple[Tensor, Tensor]:
    """Scores and words of four sentences of different lengths."""
    torch.manual_seed(0)
    words = torch.tensor(
        [[1, 2, 3, 4], [4, 3, PAD, PAD], [2, PAD, PAD, PAD], [1, 1, 1, PAD]]
    )
    return torch.randn(4, 4, 5), words


def test_parts_weighted_by_samples_add_up_to_the_whole() -> None:
    """However the batch is cut: three sentences and one, or two and two."""
    score, words = sentences()
    objective = Sentences(PAD)
    whole = {"loss": objective.loss(score, words), **objective.metrics(score, words)}
    for cut in (1, 2, 3):
        parts = [
            {
                "loss": objective.loss(score[rows], words[rows]),
                **objective.metrics(score[rows], words[rows]),
            }
            for rows in (slice(0, cut), slice(cut, 4))
        ]
        for name, value in whole.items():
            sums = cut * parts[0][name] + (4 - cut) * parts[1][name]
            torch.testing.assert_close(sums / 4, value)


def test_padding_is_not_trained_on() -> None:
    """What is scored there changes nothing, and gets no gradient."""
    score, words = sentences()
    objective = Sentences(PAD)
    other = score.clone()
    other[words == PAD] = 7.0
    score.requires_grad_()
    loss = objective.loss(score, words)
    loss.backward()

    assert torch.equal(loss, objective.loss(other, words))
    assert score.grad is not None
    assert (score.grad[words == PAD] == 0).all()
    assert (score.grad[words != PAD] != 0).any(-1).all()


def test_guessing_costs_the_logarithm() -> None:
    """Of the number of words, for each word."""
    _, words = sentences()
    objective = Sentences(PAD)
    score = torch.zeros(4, 4, 5)
    num_words = float((words != PAD).sum()) / 4
    assert isclose(
        float(objective.loss(score, words)), num_words * log(5), rel_tol=1e-6
    )
    nats = objective.metrics(score, words)["nats_per_word"]
    assert isclose(float(nats), log(5), rel_tol=1e-6)


def test_accuracy_counts_words() -> None:
    """A right guess at padding counts for nothing."""
    _, words = sentences()
    right = torch.nn.functional.one_hot(words, 5).float()
    assert float(Sentences(PAD).metrics(right, words)["accuracy"]) == 1.0
    wrong = torch.nn.functional.one_hot((words + 1) % 5, 5).float()
    assert float(Sentences(PAD).metrics(wrong, words)["accuracy"]) == 0.0


def test_hugging_face_outputs_are_taken_as_they_are() -> None:
    """A dict with `logits` scores as the tensor does."""
    score, label = torch.randn(3, 4), torch.tensor([0, 3, 1])
    wrapped = {"logits": score}
    assert torch.equal(class_loss(wrapped, label), class_loss(score, label))
    assert class_metrics(wrapped, label) == class_metrics(score, label)


@pytest.mark.parametrize("label", [-1, 4, 99])
def test_labels_out_of_range(label: int) -> None:
    """Which one, where, and what there is."""
    labels = torch.tensor([0, label, 3])
    with pytest.raises(
        DataError, match=rf"label {label} \(sample 1 .* from 0 to 3.* 4 classes"
    ):
        class_loss(torch.randn(3, 4), labels)
