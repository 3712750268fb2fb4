"""Two views of each training image of a recipe, and k-NN accuracy as its measure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hocket.recipes.config.data_settings import Stl10Settings
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.teacher_settings import TwoViewSettings
from hocket.recipes.data.images.cifar import Cifar
from hocket.recipes.data.images.image_folder import ImageFolder
from hocket.recipes.data.images.stl10 import Stl10
from hocket.recipes.data.load import load_samples
from hocket.run.data.metrics import EvaluationResult
from hocket.run.data.sample_loader import EvaluationLoader
from hocket.run.data.samples import FirstSamples, Samples
from hocket.run.pipeline import Pipeline
from hocket.teacher.evaluation import knn_accuracy
from hocket.teacher.view_loader import TwoViewLoader, TwoViewSamples
from hocket.teacher.views import TwoViews


def two_view_samples(samples: Samples, settings: TwoViewSettings) -> TwoViewSamples:
    """Return samples whose rows are views.

    Args:
        samples: images of one of our readers.
        settings: the smallest share of an image that a view shows.
    """
    whole = samples.samples if isinstance(samples, FirstSamples) else samples
    assert isinstance(whole, Cifar | Stl10 | ImageFolder), "the recipe is valid"
    side = whole.side if isinstance(whole, ImageFolder) else whole.variation.side
    views = TwoViews(
        side,
        least_area=settings.least_area,
        mean=whole.colours.mean,
        std=whole.colours.std,
    )
    labels = whole.labels[: samples.num_samples]
    return TwoViewSamples(partial(_image, whole), labels, views, samples.fingerprint)


def _image(samples: Cifar | Stl10 | ImageFolder, row: int) -> Any:
    """Return an image as it is: bytes (3, side, side), or Pillow's."""
    if isinstance(samples, ImageFolder):
        return samples.image(row)
    return samples.images(torch.tensor([row]))[0]


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
            the same data are read beside them.
        test: the samples to evaluate on.
    """
    settings, data = recipe.teacher, recipe.data
    if not isinstance(settings, TwoViewSettings):
        return None
    if isinstance(data, Stl10Settings) and data.unlabeled:
        labelled = data.model_copy(update={"unlabeled": False})
        training, _ = load_samples(recipe.model_copy(update={"data": labelled}))
    return KnnEvaluation(
        training,
        test,
        two_view_samples(test, settings),
        recipe.training.batch_size,
        recipe.training.num_loaders,
        settings.num_neighbours,
    )
