"""What recipes measure: the usual loss, and evaluations of all outputs together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from hocket.errors import DataError, RecipeError
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.settings import TwoViewSettings
from hocket.recipes.data import whole_of
from hocket.run.data.loss import TOTAL, LossFunction, named_losses
from hocket.run.data.metrics import EvaluationResult
from hocket.run.data.sample_loader import EvaluationLoader
from hocket.run.data.samples import Samples, first_samples
from hocket.run.pipeline import Pipeline
from hocket.teacher.evaluation import knn_accuracy
from hocket.teacher.views import TwoViewLoader, TwoViews, TwoViewSamples

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
    if score_BK.dtype is torch.bfloat16:  # as autocast does it
        score_BK = score_BK.float()
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
        loader: loads the samples to evaluate on.
        loss: the loss of training.
        measure: called with the outputs, on the CPU, and the data set whose first rows
            they are of; returns named values.
    """

    loader: EvaluationLoader
    loss: LossFunction
    measure: Callable[[Any, Any], Mapping[str, float]]

    def __call__(self, pipeline: Pipeline, *, use_ema: bool) -> EvaluationResult:
        """Evaluate; every worker must call this."""
        return self.of_outputs(pipeline.outputs(self.loader, use_ema=use_ema))

    def of_outputs(self, outputs: Any) -> EvaluationResult:
        """Evaluate the model's outputs for all samples, on the CPU."""
        samples = self.loader.samples
        num_samples = samples.num_samples
        targets = samples.targets(torch.arange(num_samples), None)
        named = named_losses(self.loss(outputs, targets))
        losses = {name: float(value) for name, value in named.items()}
        metrics = dict(self.measure(outputs, whole_of(samples)))
        return EvaluationResult(losses[TOTAL], losses, metrics, num_samples)


# Two views of each training image of a recipe, and k-NN accuracy as its measure.
_PICTURES: Final = ("image", "labels", "side", "colours")  # that views need


def two_view_samples(samples: Samples, settings: TwoViewSettings) -> TwoViewSamples:
    """Return samples whose rows are views.

    Args:
        samples: images.
        settings: the smallest share of an image that a view shows.

    Raises:
        RecipeError: the samples cannot give their images as they are.
    """
    whole = whole_of(samples)
    if not all(hasattr(whole, name) for name in _PICTURES):
        raise RecipeError(
            f"teacher.kind {settings.kind!r} reads two views of each image: the "
            "function of [data] must return samples with image(row), labels, side "
            f"(pixels) and colours (mean, std), not {type(whole).__name__}"
        )
    views = TwoViews(
        whole.side,
        least_area=settings.least_area,
        mean=whole.colours.mean,
        std=whole.colours.std,
    )
    labels = whole.labels[: samples.num_samples]
    return TwoViewSamples(whole.image, labels, views, samples.fingerprint)


@dataclass(frozen=True, slots=True)
class KnnEvaluation:
    """Measures features by k-NN, and the loss of training on views of other images.

    Args:
        training: loads the images whose classes are known.
        test: loads the images to be classified.
        views: views of the latter, for the loss.
        num_neighbours: k, or as many as there are images if those are fewer.
    """

    training: EvaluationLoader
    test: EvaluationLoader
    views: TwoViewSamples
    num_neighbours: int

    def __call__(self, pipeline: Pipeline, *, use_ema: bool) -> EvaluationResult:
        """Evaluate; every worker must call this."""
        test = self.test
        size = min(test.batch_size, self.views.num_samples)
        loader = TwoViewLoader(
            self.views, size, shuffle=False, num_workers=test.num_workers
        )
        result = pipeline.evaluate(loader, use_ema=use_ema)
        known, classes = self._features(pipeline, self.training, use_ema=use_ema)
        found, wanted = self._features(pipeline, test, use_ema=use_ema)
        k = min(self.num_neighbours, len(known))
        accuracy = knn_accuracy(known, classes, found, wanted, num_neighbours=k)
        return EvaluationResult(
            result.loss, result.losses, {"knn_accuracy": accuracy}, len(found)
        )

    def _features(
        self, pipeline: Pipeline, loader: EvaluationLoader, *, use_ema: bool
    ) -> tuple[Tensor, Tensor]:
        outputs = pipeline.outputs(loader, use_ema=use_ema)
        rows = torch.arange(loader.samples.num_samples)
        return outputs["features"], loader.samples.targets(rows, None)


def evaluation_loader(recipe: Recipe, samples: Samples) -> EvaluationLoader:
    """Return a loader of every sample once."""
    training = recipe.training
    return EvaluationLoader(
        samples, training.batch_size, num_workers=training.num_loaders
    )


def knn_evaluation(
    recipe: Recipe, training: Samples, test: Samples
) -> KnnEvaluation | None:
    """Return the evaluation of a recipe with two views; None for other recipes.

    Args:
        recipe: the recipe.
        training: the samples to train on; if they have no classes, the labelled ones of
            the same data, `labelled`, are in their place.
        test: the samples to evaluate on.
    """
    settings = recipe.teacher
    if not isinstance(settings, TwoViewSettings):
        return None
    if (labelled := getattr(whole_of(training), "labelled", None)) is not None:
        training = first_samples(labelled, training.num_samples)
    return KnnEvaluation(
        evaluation_loader(recipe, training),
        evaluation_loader(recipe, test),
        two_view_samples(test, settings),
        settings.num_neighbours,
    )
