"""The section [model]: what each kind of model takes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from hocket.errors import ShapeError
from hocket.recipes.config.resnext_depths import resnext_blocks
from hocket.recipes.config.settings import (
    Count,
    Decay,
    FunctionSettings,
    NaturalNumber,
    Settings,
)


class TransformerSettings(Settings):
    """Settings that all transformers have.

    Args:
        width: features per token; a multiple of `num_heads`.
        num_blocks: pairs of attention and MLP.
        num_heads: heads of each attention.
        mlp_width: features inside each MLP.
        dropout: the probability, where each half of a block joins the residual stream.
    """

    width: Count = 64
    num_blocks: Count = 6
    num_heads: Count = 4
    mlp_width: Count = 128
    dropout: Decay = 0.0

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> TransformerSettings:
        if self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} is not a multiple of num_heads {self.num_heads}"
            )
        return self


class VitSettings(TransformerSettings):
    """A small vision transformer (`hocket.recipes.models.vit`).

    Args:
        patch_size: pixels per side of a patch; divides the image's side.
        pooling: what the head reads: a class token, or the mean over all tokens.
        pretrained: a folder with model.safetensors, of the same sizes, to begin with:
            weights that `hocket checkpoint export` wrote, or timm's; the head counts if
            it has as many classes. Random weights where it is not said.
    """

    kind: Literal["vit"]
    patch_size: Count = 2
    pooling: Literal["token", "mean"] = "token"
    pretrained: str | None = None


class GptSettings(TransformerSettings):
    """A byte-level GPT (`hocket.recipes.models.gpt`).

    Args:
        tie_weights: whether the head reads the token embedding's weights.
        sample_bytes: how much text to generate when training has ended.
    """

    kind: Literal["gpt"]
    tie_weights: bool = False
    sample_bytes: NaturalNumber = 200


class BertSettings(TransformerSettings):
    """BERT of the package transformers, with a head for classes, or for spans.

    Args:
        pretrained: a folder in Hugging Face's form (config.json, model.safetensors), of
            the same sizes, to begin with; random weights where it is not said.
    """

    kind: Literal["bert"]
    pretrained: str | None = None


class ResnetSettings(Settings):
    """A small residual network (`hocket.recipes.models.resnet`).

    Args:
        width: channels of the first of three groups; each doubles them.
        num_blocks: blocks in each group.
    """

    kind: Literal["resnet"]
    width: Count = 16
    num_blocks: Count = 3


class ColourNetSettings(Settings):
    """Classifiers of colour images of many sizes."""


class ResnextSettings(ColourNetSettings):
    """torchvision's ResNeXt by depth, with a head for as many classes as the data have.

    One group of 64 channels makes it the ResNet of that depth.

    Args:
        depth: layers with weights: 14, 26, 50, 101, 152, or 194 and more.
        num_groups: groups of the convolution in the middle of each block.
        group_width: channels of each of these groups; 32 groups of 4 are "32x4d".
        pretrained: a folder with model.safetensors, of the same sizes, under
            torchvision's names, to begin with; its head counts if it has as many
            classes. Random weights where it is not said.
    """

    kind: Literal["resnext"]
    depth: Count = 50
    num_groups: Count = 32
    group_width: Count = 4
    pretrained: str | None = None

    @field_validator("depth")
    @classmethod
    def _is_a_resnext(cls, depth: int) -> int:
        try:
            resnext_blocks(depth)
        except ShapeError as error:  # pydantic takes only a ValueError for a fault
            raise ValueError(str(error)) from None
        return depth


class DensenetSettings(ColourNetSettings):
    """torchvision's DenseNet (`hocket.recipes.models.make`).

    Args:
        depth: layers with weights.
        growth_rate: channels that each layer adds.
    """

    kind: Literal["densenet"]
    depth: Literal[121, 169, 201] = 121
    growth_rate: Count = 32


class MobilenetSettings(ColourNetSettings):
    """torchvision's MobileNetV3-Large (`hocket.recipes.models.make`).

    Args:
        width_multiplier: every layer's channels, beside the published ones; 0.25 to 1
            were measured.
    """

    kind: Literal["mobilenet-v3"]
    width_multiplier: Annotated[float, Field(ge=0.1, le=4.0)] = 1.0


class NasnetSettings(ColourNetSettings):
    """NASNet-A (`hocket.recipes.models.nasnet`).

    Args:
        num_features: what the head reads; 24 times the width of the first cells.
        num_cells: normal cells in each of three groups.
    """

    kind: Literal["nasnet"]
    num_features: Annotated[int, Field(gt=0, multiple_of=96)] = 1056
    num_cells: Count = 4


class TorchvisionSettings(ColourNetSettings):
    """Any of torchvision's classifiers, at its own size, with random weights.

    Args:
        name: as `torchvision.models.list_models` has it: resnet101, mobilenet_v2, ...
    """

    kind: Literal["torchvision"]
    name: str


class FfnnSettings(Settings):
    """A feed-forward network on images (`hocket.recipes.models.make`).

    Args:
        width: features of each layer.
        num_layers: layers with a ReLU behind each, without the head.
    """

    kind: Literal["ffnn"]
    width: Count = 4096
    num_layers: Count = 16


class RnnSettings(Settings):
    """LSTM layers on bytes (`hocket.recipes.models.gpt`).

    Args:
        width: features of each layer.
        num_layers: LSTM layers.
        dropout: the probability, between layers.
    """

    kind: Literal["rnn"]
    width: Count = 1024
    num_layers: Count = 16
    dropout: Decay = 0.0


class ModelFunctionSettings(FunctionSettings):
    """A function that returns the user's own model, an `nn.Module`."""


ModelSettings = (
    VitSettings
    | GptSettings
    | BertSettings
    | ResnetSettings
    | ResnextSettings
    | DensenetSettings
    | MobilenetSettings
    | NasnetSettings
    | TorchvisionSettings
    | FfnnSettings
    | RnnSettings
    | ModelFunctionSettings
)
