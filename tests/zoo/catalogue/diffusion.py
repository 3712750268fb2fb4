"""Denoising networks of diffusers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from diffusers import DiTTransformer2DModel, UNet2DConditionModel

from tests.model.support.stages_by_hand import Case


def dit() -> Case:
    """A diffusion transformer, with time and class."""
    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        norm_num_groups=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    inputs = {
        "hidden_states": torch.randn(4, 4, 8, 8),
        "timestep": torch.randint(10, (4,)),
        "class_labels": torch.randint(10, (4,)),
    }
    return Case(model.train(), (), inputs)


def unet_2d() -> Case:
    """A U-Net with attention to a text, and time."""
    model = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    inputs = {
        "sample": torch.randn(4, 4, 8, 8),
        "timestep": torch.randint(10, (4,)),
        "encoder_hidden_states": torch.randn(4, 5, 16),
    }
    return Case(model.train(), (), inputs)


CASES: Final[dict[str, Callable[[], Case]]] = {"dit": dit, "unet-2d": unet_2d}
