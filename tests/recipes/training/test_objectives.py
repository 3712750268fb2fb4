"""Losses and metrics are means over samples, which no cut of the batch changes."""

from __future__ import annotations

import pytest
import torch

from hocket.errors import DataError
from hocket.recipes.objectives import class_loss, class_metrics


def test_parts_weighted_by_samples_add_up_to_the_whole() -> None:
    """However the batch is cut: three samples and one, or two and two."""
    torch.manual_seed(0)
    score, label = torch.randn(4, 5), torch.tensor([1, 4, 2, 1])
    whole = class_metrics(score, label) | {"loss": class_loss(score, label)}
    for cut in (1, 2, 3):
        parts = [
            class_metrics(score[rows], label[rows])
            | {"loss": class_loss(score[rows], label[rows])}
            for rows in (slice(0, cut), slice(cut, 4))
        ]
        for name, value in whole.items():
            sums = cut * parts[0][name] + (4 - cut) * parts[1][name]
            torch.testing.assert_close(sums / 4, value)


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
