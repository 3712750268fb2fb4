"""What is wanted of each kind of data: losses and metrics, as means over samples.

A loss sees one microbatch. Means over samples add up to the batch's exactly, however it
is cut; a mean over all words would weigh sentences by the company they are in.

Shapes: B samples, K classes, T words or bytes, V of which there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log
from typing import Any

from torch import Tensor
from torch.nn import functional

from hocket.errors import DataError

Loss = Callable[[Any, Any], Tensor | Mapping[str, Tensor]]
Metrics = Callable[[Any, Any], Mapping[str, Tensor]]


def class_loss(output: Any, label_B: Tensor) -> Tensor:
    """Mean cross-entropy over all samples, in nats.

    Args:
        output: the scores (B, K), or what Hugging Face's models return them in.
        label_B: 0 to K - 1.

    Raises:
        DataError: a label is out of range.
    """
    score_BK = scores_of(output)
    check_labels(label_B, score_BK.shape[-1])
    return functional.cross_entropy(score_BK, label_B)


def class_metrics(output: Any, label_B: Tensor) -> dict[str, Tensor]:
    """The share of samples whose class is guessed right."""
    return {"accuracy": (scores_of(output).argmax(-1) == label_B).float().mean()}


def byte_loss(score_BTV: Tensor, target_BT: Tensor) -> Tensor:
    """Mean cross-entropy over all bytes of all windows, in nats per byte."""
    return functional.cross_entropy(score_BTV.flatten(0, 1), target_BT.flatten())


def byte_metrics(score_BTV: Tensor, target_BT: Tensor) -> dict[str, Tensor]:
    """How many bits each byte costs, and how many are guessed right."""
    return {
        "bits_per_byte": byte_loss(score_BTV, target_BT) / log(2),
        "accuracy": (score_BTV.argmax(-1) == target_BT).float().mean(),
    }


def scores_of(output: Any) -> Tensor:
    """The tensor of scores in what a model returns."""
    score: Tensor = output["logits"] if isinstance(output, Mapping) else output
    return score


def check_labels(label_B: Tensor, num_classes: int) -> None:
    """Refuse labels that are no classes; on a GPU, looking would wait for it.

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
