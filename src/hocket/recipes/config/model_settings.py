"""The section [model]: what each kind of model takes."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

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
    """

    kind: Literal["vit"]
    patch_size: Count = 2
    pooling: Literal["token", "mean"] = "token"


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
    VitSettings | GptSettings | BertSettings | RnnSettings | ModelFunctionSettings
)
