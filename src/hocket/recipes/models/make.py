"""Makes a recipe's model, such as a vision transformer, and the heads of two views.

The recipe's seed determines the weights.

Shapes: B images, C channels, S side in pixels, T tokens, W width, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, Final, assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional

from hocket.errors import ModelError, RecipeError
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.sections import ModelFunctionSettings, VitSettings
from hocket.recipes.config.settings import TwoViewSettings
from hocket.recipes.data import whole_of
from hocket.recipes.user_functions import call_function
from hocket.run.data.samples import Samples
from hocket.signatures import values_of


# A transformer's block: attention and MLP, pre-norm.
#
#     x ──┬─ norm ─ attention ─ dropout ─(+)──┬─ norm ─ MLP ─ dropout ─(+)─▶
#         └───────────────────────────────┘   └────────────────────────┘
#
# Only one tensor crosses from block to block, so that between any two a cut is cheap.
#
# Shapes: B samples, T tokens, W width, H heads, D = W / H.
@dataclass(frozen=True, slots=True)
class Blocks:
    """The sizes of a stack of blocks.

    Args:
        width: W, a multiple of `num_heads`.
        num_blocks: the number of blocks.
        num_heads: H.
        mlp_width: features inside each MLP.
        dropout: the probability, on what attention and MLP add.
    """

    width: int
    num_blocks: int
    num_heads: int
    mlp_width: int
    dropout: float = 0.0

    def make(self, *, causal: bool) -> nn.Sequential:
        """Make a newly initialised stack."""
        return nn.Sequential(
            *(Block(self, causal=causal) for _ in range(self.num_blocks))
        )


class Attention(nn.Module):
    """Multi-head self-attention: (B, T, W) to (B, T, W).

    Args:
        width: W, a multiple of `num_heads`.
        num_heads: H.
        causal: whether a token sees only itself and those before it.
    """

    def __init__(self, width: int, num_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Mix the tokens."""
        qkv_BT3HD = self.qkv(x_BTW).unflatten(-1, (3, self.num_heads, -1))
        q_BHTD, k_BHTD, v_BHTD = qkv_BT3HD.permute(2, 0, 3, 1, 4).unbind(0)
        mixed_BHTD = functional.scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, is_causal=self.causal
        )
        out_BTW: Tensor = self.out(mixed_BHTD.transpose(1, 2).flatten(-2))
        return out_BTW


class Block(nn.Module):
    """Attention, then an MLP, each with a norm before and a residual after.

    Args:
        sizes: the sizes of the stack.
        causal: whether a token sees only itself and those before it.
    """

    def __init__(self, sizes: Blocks, *, causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes.width, sizes.num_heads, causal=causal)
        self.mlp_norm = nn.LayerNorm(sizes.width)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.width, sizes.mlp_width),
            nn.GELU(),
            nn.Linear(sizes.mlp_width, sizes.width),
        )
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """One step of the residual stream."""
        x_BTW = x_BTW + self.dropout(self.attention(self.attention_norm(x_BTW)))
        out_BTW: Tensor = x_BTW + self.dropout(self.mlp(self.mlp_norm(x_BTW)))
        return out_BTW


# Patch embeddings of normalised pixels have a norm near one at first. Positions much
# smaller than that (0.02 is usual for large models) have no effect for ten epochs.
POSITION_STD: Final = 0.5


class Pooling(Enum):
    """The input of the head."""

    TOKEN = "token"  # one learned token beside the patches
    MEAN = "mean"  # the mean over all patches


class VisionTransformer(nn.Module):
    """Images (B, C, S, S) to class scores (B, K). Pre-norm, learned positions.

    Args:
        image_side: S.
        num_channels: C.
        num_classes: K.
        patch_size: pixels per side of a patch; divides `image_side`.
        blocks: the sizes of the blocks; W is their width.
        pooling: the input of the head.

    Source: Dosovitskiy et al., arXiv:2010.11929, section 3.1.
    """

    def __init__(
        self,
        *,
        image_side: int,
        num_channels: int,
        num_classes: int,
        patch_size: int,
        blocks: Blocks,
        pooling: Pooling = Pooling.TOKEN,
    ) -> None:
        super().__init__()
        num_tokens = (image_side // patch_size) ** 2
        self.patches = nn.Conv2d(
            num_channels, blocks.width, patch_size, stride=patch_size
        )
        self.token: nn.Parameter | None = None
        if pooling is Pooling.TOKEN:
            self.token = nn.Parameter(torch.zeros(1, 1, blocks.width))
            num_tokens += 1
        self.positions = nn.Parameter(
            POSITION_STD * torch.randn(num_tokens, blocks.width)
        )
        self.blocks = blocks.make(causal=False)
        self.norm = nn.LayerNorm(blocks.width)
        self.head = nn.Linear(blocks.width, num_classes)

    def forward(self, image_BCSS: Tensor) -> Tensor:
        """Score the classes."""
        x_BTW = self.patches(image_BCSS).flatten(2).transpose(1, 2)
        if self.token is not None:
            token_B1W = self.token.expand(x_BTW.shape[0], -1, -1)
            x_BTW = torch.cat([token_B1W, x_BTW], dim=1)
        x_BTW = self.norm(self.blocks(x_BTW + self.positions))
        pooled_BW = x_BTW.mean(1) if self.token is None else x_BTW[:, 0]
        score_BK: Tensor = self.head(pooled_BW)
        return score_BK


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
        self.projector = _mlp(num_features, heads.num_projector_layers, heads)

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
        self.predictor = _mlp(heads.output_width, heads.num_predictor_layers, heads)

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


def _mlp(num_inputs: int, num_layers: int, heads: TwoViewSettings) -> nn.Module:
    """Linear layers, with batch normalization and ReLU between them."""
    inside = [heads.head_width] * (num_layers - 1)
    widths = [num_inputs, *inside, heads.output_width]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after, bias=False), nn.BatchNorm1d(after)]
        layers.append(nn.ReLU())
    del layers[-2:]  # behind the last one
    layers[-1] = nn.Linear(widths[-2], widths[-1])
    return nn.Sequential(*layers)
