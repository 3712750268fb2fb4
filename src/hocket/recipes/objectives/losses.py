"""The losses and metrics of each kind of data, as means over samples.

A loss sees one microbatch. Means over samples, weighted by their number, add up to the
batch's exactly, however it is cut; means over masked pieces do so by their number.

Shapes: B samples, K classes, T words or bytes, V different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log
from typing import Any

from torch import Tensor
from torch.nn import functional

from hocket.errors import DataError
from hocket.recipes.data.masked_text import NOT_GUESSED

Loss = Callable[[Any, Any], Tensor | Mapping[str, Tensor]]
Metrics = Callable[[Any, Any], Mapping[str, Tensor]]


def class_loss(output: Any, label_B: Tensor) -> Tensor:
    """Return the mean cross-entropy over all samples, in nats.

    Args:
        output: the scores (B, K), or the output of one of Hugging Face's models.
        label_B: 0 to K - 1.

    Raises:
        DataError: a label is out of range.
    """
    score_BK = scores_of(output)
    check_labels(label_B, score_BK.shape[-1])
    return functional.cross_entropy(score_BK, label_B)


def class_metrics(output: Any, label_B: Tensor) -> dict[str, Tensor]:
    """Return the share of samples whose class is predicted correctly."""
    return {"accuracy": (scores_of(output).argmax(-1) == label_B).float().mean()}


def byte_loss(score_BTV: Tensor, target_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy over all bytes of all windows, in nats."""
    return functional.cross_entropy(score_BTV.flatten(0, 1), target_BT.flatten())


def byte_metrics(score_BTV: Tensor, target_BT: Tensor) -> dict[str, Tensor]:
    """Return the cross-entropy in bits, and the share of correct predictions."""
    return {
        "bits_per_byte": byte_loss(score_BTV, target_BT) / log(2),
        "accuracy": (score_BTV.argmax(-1) == target_BT).float().mean(),
    }


def masked_loss(output: Any, target_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy over the masked pieces, in nats."""
    return functional.cross_entropy(
        scores_of(output).flatten(0, 1), target_BT.flatten(), ignore_index=NOT_GUESSED
    )


def num_masked(target_BT: Tensor) -> Tensor:
    """Return how many pieces are masked, which `masked_loss` divides by."""
    return (target_BT != NOT_GUESSED).sum()


def masked_metrics(output: Any, target_BT: Tensor) -> dict[str, Tensor]:
    """Return the share of masked pieces that are guessed correctly."""
    is_right_BT = scores_of(output).argmax(-1) == target_BT
    return {"masked_accuracy": is_right_BT.sum() / num_masked(target_BT)}


def span_loss(output: Any, place_B2: Tensor) -> Tensor:
    """Return the mean of two cross-entropies, of a span's first and last piece.

    Args:
        output: with `start_logits` and `end_logits`, each (B, T).
        place_B2: the places of both pieces, 0 to T - 1.
    """
    first = functional.cross_entropy(output["start_logits"], place_B2[:, 0])
    return (first + functional.cross_entropy(output["end_logits"], place_B2[:, 1])) / 2


def scores_of(output: Any) -> Tensor:
    """Return the scores in a model's output."""
    score: Tensor = output["logits"] if isinstance(output, Mapping) else output
    return score


def check_labels(label_B: Tensor, num_classes: int) -> None:
    """Refuse labels that are no classes; not checked on a GPU, to avoid a sync.

    Raises:
        DataError: names the first one.
    """
    if label_B.device.type != "cpu":
        return
    wrong = (label_B < 0) | (label_B >= num_classes)
    if wrong.any():
        place = int(wrong.nonzero()[0, 0])
        raise DataError(
            f"label {int(label_B[place])} (sample {place} of a microbatch) is not from "
            f"0 to {num_classes - 1}: the model scores {num_classes} classes"
        )
