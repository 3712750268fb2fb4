"""Two views of each training image of a recipe, and k-NN accuracy as its measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from hocket.errors import RecipeError
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.teacher_settings import TwoViewSettings
from hocket.recipes.data import whole_of
from hocket.run.data.metrics import EvaluationResult
from hocket.run.data.sample_loader import EvaluationLoader
from hocket.run.data.samples import Samples, first_samples
from hocket.teacher.evaluation import knn_accuracy
from hocket.teacher.views import TwoViewLoader, TwoViews, TwoViewSamples

if TYPE_CHECKING:
    from hocket.run.pipeline import Pipeline


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
        training: the images whose classes are known.
        test: the images to be classified.
        views: views of the latter, for the loss.
        batch_size: images per batch.
        num_loaders: processes that read ahead.
        num_neighbours: k, or as many as there are images if those are fewer.
    """

    training: Samples
    test: Samples
    views: TwoViewSamples
    batch_size: int
    num_loaders: int
    num_neighbours: int

    def __call__(self, pipeline: Pipeline, *, use_ema: bool) -> EvaluationResult:
        """Evaluate; every worker must call this."""
        size = min(self.batch_size, self.test.num_samples)
        loader = TwoViewLoader(
            self.views, size, shuffle=False, num_workers=self.num_loaders
        )
        result = pipeline.evaluate(loader, use_ema=use_ema)
        known, classes = self._features(pipeline, self.training, use_ema=use_ema)
        found, wanted = self._features(pipeline, self.test, use_ema=use_ema)
        accuracy = knn_accuracy(
            known,
            classes,
            found,
            wanted,
            num_neighbours=min(self.num_neighbours, len(known)),
        )
        return EvaluationResult(
            result.loss, result.losses, {"knn_accuracy": accuracy}, len(found)
        )

    def _features(
        self, pipeline: Pipeline, samples: Samples, *, use_ema: bool
    ) -> tuple[Tensor, Tensor]:
        loader = EvaluationLoader(
            samples, self.batch_size, num_workers=self.num_loaders
        )
        outputs = pipeline.outputs(loader, use_ema=use_ema)
        rows = torch.arange(samples.num_samples)
        return outputs["features"], samples.targets(rows, None)


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
    labelled = getattr(whole_of(training), "labelled", None)
    return KnnEvaluation(
        training if labelled is None else first_samples(labelled, training.num_samples),
        test,
        two_view_samples(test, settings),
        recipe.training.batch_size,
        recipe.training.num_loaders,
        settings.num_neighbours,
    )
