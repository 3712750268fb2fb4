"""The section [model]: what each kind of model takes."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from hocket.recipes.config.settings import Count, Decay, FunctionSettings, Settings


class VitSettings(Settings):
    """A small vision transformer (`hocket.recipes.models.vit`).

    Args:
        width: features per token; a multiple of `num_heads`.
        num_blocks: pairs of attention and MLP.
        num_heads: heads of each attention.
        mlp_width: features inside each MLP.
        dropout: the probability, where each half of a block joins the residual stream.
        patch_size: pixels per side of a patch; divides the image's side.
        pooling: what the head reads: a class token, or the mean over all tokens.
    """

    kind: Literal["vit"]
    width: Count = 64
    num_blocks: Count = 6
    num_heads: Count = 4
    mlp_width: Count = 128
    dropout: Decay = 0.0
    patch_size: Count = 2
    pooling: Literal["token", "mean"] = "token"

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> VitSettings:
        if self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} is not a multiple of num_heads {self.num_heads}"
            )
        return self


class ModelFunctionSettings(FunctionSettings):
    """A function that returns the user's own model, an `nn.Module`."""


ModelSettings = VitSettings | ModelFunctionSettings
