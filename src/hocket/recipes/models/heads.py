"""Projector and predictor behind a model, for losses that compare two views.

    student   image ─ model ─ features ─ projector ─ predictor ─ output
    teacher   image ─ model ─ features ─ projector ─ output

Names are the same in both nets, so that a teacher can follow the student. Batch
normalization takes its means over a microbatch.

Shapes: B images, F features, W inside a head, O outputs.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from hocket.errors import ModelError
from hocket.recipes.config.teacher_settings import TwoViewSettings


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
