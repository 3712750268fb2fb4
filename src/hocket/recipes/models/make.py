"""Makes a recipe's model; its seed determines the weights."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final, assert_never

import torch
from torch import Tensor, nn

from hocket.errors import ModelError, RecipeError
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.sections import ModelFunctionSettings, VitSettings
from hocket.recipes.config.settings import TwoViewSettings
from hocket.recipes.data import whole_of
from hocket.recipes.models.vit import Blocks, Pooling, VisionTransformer
from hocket.recipes.user_functions import call_function
from hocket.run.data.samples import Samples
from hocket.signatures import values_of

_IMAGES: Final = ("num_channels", "side", "num_classes")  # what a vit asks of data


def make_model(recipe: Recipe, training: Samples) -> nn.Module:
    """Make a newly initialised model.

    Args:
        recipe: the recipe.
        training: the samples to train on, for the numbers of classes and words.

    Raises:
        RecipeError: the user's function returns no module.
        DataError: pretrained weights are missing, or another model's.
        MissingPackageError: the package that has the model is not installed.
    """
    torch.manual_seed(recipe.training.seed)
    whole = whole_of(training)
    match recipe.model:
        case VitSettings() as vit:
            return _vit(vit, whole)
        case ModelFunctionSettings() as own:
            return _own_model(own, whole)
        case _:
            assert_never(recipe.model)


def _vit(settings: VitSettings, images: Any) -> nn.Module:
    """Make a vision transformer of the images' sizes.

    Raises:
        RecipeError: the data are no images, or patches do not fill them.
    """
    if not all(hasattr(images, name) for name in _IMAGES):
        raise RecipeError(
            "model.kind 'vit' reads images: the function of [data] must return samples "
            "with num_channels, side (pixels) and num_classes"
        )
    if images.side % settings.patch_size:
        raise RecipeError(
            f"model.patch_size {settings.patch_size} does not divide the images' side "
            f"of {images.side} pixels"
        )
    return VisionTransformer(
        image_side=images.side,
        num_channels=images.num_channels,
        num_classes=images.num_classes,
        patch_size=settings.patch_size,
        pooling=Pooling(settings.pooling),
        blocks=Blocks(**values_of(Blocks, settings)),
    )


def _own_model(settings: ModelFunctionSettings, samples: Samples) -> nn.Module:
    model = call_function("model", settings, data=samples)
    if not isinstance(model, nn.Module):
        raise RecipeError(
            f"{settings.function} returned {type(model).__name__}: it must return a "
            "torch.nn.Module"
        )
    return model


# Projector and predictor behind a model, for losses that compare two views.
#
#     student   image ─ model ─ features ─ projector ─ predictor ─ output
#     teacher   image ─ model ─ features ─ projector ─ output
#
# Names are the same in both nets, so that a teacher can follow the student. Batch
# normalization takes its means over a microbatch.
#
# Shapes: B images, F features, W inside a head, O outputs.
class Projected(nn.Module):
    """The teacher: images to projections (B, O).

    Args:
        model: a classifier, whose last layer is left out.
        heads: says the heads' sizes.

    Raises:
        ModelError: the model does not end in a linear layer.
    """

    def __init__(self, model: nn.Module, heads: TwoViewSettings) -> None:
        super().__init__()
        num_features = _remove_head(model)
        self.model = model
        self.projector = _mlp(
            num_features,
            heads.head_width,
            heads.output_width,
            heads.num_projector_layers,
        )

    def forward(self, image_BCSS: Tensor) -> Tensor:
        """Project images."""
        projection_BO: Tensor = self.projector(self.model(image_BCSS))
        return projection_BO


class Predicting(Projected):
    """The student: images to `features` (B, F) and `output` (B, O), its predictions.

    Args:
        model: a classifier, whose last layer is left out.
        heads: says the heads' sizes.

    Raises:
        ModelError: the model does not end in a linear layer.
    """

    def __init__(self, model: nn.Module, heads: TwoViewSettings) -> None:
        super().__init__(model, heads)
        width = heads.output_width
        self.predictor = _mlp(
            width, heads.head_width, width, heads.num_predictor_layers
        )

    def forward(self, image_BCSS: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        """Predict the teacher's projections of the other views."""
        features_BF = self.model(image_BCSS)
        output_BO = self.predictor(self.projector(features_BF))
        return {"features": features_BF, "output": output_BO}


def _remove_head(model: nn.Module) -> int:
    """Replace a classifier's last layer by the identity; return its input's width."""
    for name in ("head", "fc"):
        head = getattr(model, name, None)
        if isinstance(head, nn.Linear):
            setattr(model, name, nn.Identity())
            return head.in_features
    raise ModelError(
        f"{type(model).__name__} has no linear layer named 'head' or 'fc' at its end: "
        "two views need a model whose features can be read before it"
    )


def _mlp(num_inputs: int, width: int, num_outputs: int, num_layers: int) -> nn.Module:
    """Linear layers, with batch normalization and ReLU between them."""
    widths = [num_inputs, *[width] * (num_layers - 1), num_outputs]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after, bias=False), nn.BatchNorm1d(after)]
        layers.append(nn.ReLU())
    del layers[-2:]  # behind the last one
    layers[-1] = nn.Linear(widths[-2], num_outputs)
    return nn.Sequential(*layers)
