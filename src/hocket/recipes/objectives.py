"""What recipes measure: the usual loss, and evaluations of all outputs together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from hocket.errors import DataError
from hocket.recipes.data import whole_of
from hocket.run.data.loss import TOTAL, LossFunction, named_losses
from hocket.run.data.metrics import EvaluationResult
from hocket.run.data.sample_loader import EvaluationLoader
from hocket.run.data.samples import Samples

if TYPE_CHECKING:
    from hocket.run.pipeline import Pipeline


# The usual loss and metrics of data with classes, as means over samples.
#
# A loss sees one microbatch. Means over samples, weighted by their number, add up to
# the batch's exactly, however it is cut.
#
# Shapes: B samples, K classes.
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


@dataclass(frozen=True, slots=True)
class WholeEvaluation:
    """Measures what no mean over microbatches is, such as answers to questions.

    Args:
        samples: the samples to evaluate on.
        loss: the loss of training.
        measure: called with the outputs, on the CPU, and the data set whose first rows
            they are of; returns named values.
        batch_size: samples per batch.
        num_loaders: processes that read ahead.
    """

    samples: Samples
    loss: LossFunction
    measure: Callable[[Any, Any], Mapping[str, float]]
    batch_size: int
    num_loaders: int

    def __call__(self, pipeline: Pipeline, *, use_ema: bool) -> EvaluationResult:
        """Evaluate; every worker must call this."""
        loader = EvaluationLoader(
            self.samples, self.batch_size, num_workers=self.num_loaders
        )
        return self.of_outputs(pipeline.outputs(loader, use_ema=use_ema))

    def of_outputs(self, outputs: Any) -> EvaluationResult:
        """Evaluate the model's outputs for all samples, on the CPU."""
        num_samples = self.samples.num_samples
        targets = self.samples.targets(torch.arange(num_samples), None)
        named = named_losses(self.loss(outputs, targets))
        losses = {name: float(value) for name, value in named.items()}
        metrics = dict(self.measure(outputs, whole_of(self.samples)))
        return EvaluationResult(losses[TOTAL], losses, metrics, num_samples)
