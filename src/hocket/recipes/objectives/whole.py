"""Evaluates by a function that sees the outputs for all samples together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hocket.recipes.data.load import whole_of
from hocket.run.data.loss import TOTAL, LossFunction, named_losses
from hocket.run.data.metrics import EvaluationResult
from hocket.run.data.sample_loader import EvaluationLoader
from hocket.run.data.samples import Samples

if TYPE_CHECKING:
    from hocket.run.pipeline import Pipeline


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
