"""The usual loss and metrics of data with classes, as means over samples.

A loss sees one microbatch. Means over samples, weighted by their number, add up to the
batch's exactly, however it is cut.

Shapes: B samples, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from hocket.errors import DataError

Metrics = Callable[[Any, Any], Mapping[str, Tensor]]


def class_loss(output: Any, label_B: Tensor) -> Tensor:
    """Return the mean cross-entropy over all samples, in nats.

    Args:
        output: the scores (B, K), or a mapping with them, `logits`.
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
