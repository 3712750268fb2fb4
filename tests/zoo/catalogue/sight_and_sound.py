"""Models of transformers for images and speech."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import transformers as hf
from torch import Tensor

from tests.model.support.stages_by_hand import Case
from tests.zoo.catalogue.encoder_decoder import SIZES as TRANSLATOR
from tests.zoo.catalogue.text import SIZES, words


def _pixels(side: int) -> Tensor:
    return torch.randn(4, 3, side, side)


def clip() -> Case:
    """Two towers, for images and texts."""
    config = hf.CLIPConfig(
        text_config={**SIZES, "eos_token_id": 1},
        vision_config={**SIZES, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    inputs = {"input_ids": words(), "pixel_values": _pixels(16)}
    return Case(hf.CLIPModel(config).train(), (), inputs)


def detr() -> Case:
    """Detects objects; a mask of pixels is looked at in its encoder."""
    backbone = hf.ResNetConfig(  # type: ignore[call-arg]
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    config = hf.DetrConfig(  # type: ignore[call-arg]
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=4,
    )
    model = hf.DetrForObjectDetection(config)
    return Case(model.train(), (), {"pixel_values": _pixels(32)})


def segformer() -> Case:
    """Segments images; reads the hidden states of its own encoder."""
    config = hf.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        decoder_hidden_size=16,
    )
    model = hf.SegformerForSemanticSegmentation(config)
    return Case(model.train(), (), {"pixel_values": _pixels(16)}, smallest=2)


def swin() -> Case:
    """Attention in shifted windows."""
    config = hf.SwinConfig(
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[1, 2],
        window_size=2,
    )
    model = hf.SwinForImageClassification(config)
    return Case(model.train(), (), {"pixel_values": _pixels(16)})


def wav2vec2() -> Case:
    """Speech, without masking in time."""
    config = hf.Wav2Vec2Config(
        **SIZES,
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(8, 3),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        apply_spec_augment=False,
        layerdrop=0.0,
    )
    model = hf.Wav2Vec2ForSequenceClassification(config)
    return Case(model.train(), (), {"input_values": torch.randn(4, 200)})


def whisper() -> Case:
    """Speech to text."""
    config = hf.WhisperConfig(
        **TRANSLATOR,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=16,
        bos_token_id=1,
        eos_token_id=1,
    )
    inputs = {
        "input_features": torch.randn(4, 8, 20),
        "decoder_input_ids": words(6),
        "use_cache": False,
    }
    return Case(hf.WhisperForConditionalGeneration(config).train(), (), inputs)


CASES: Final[dict[str, Callable[[], Case]]] = {
    "clip": clip,
    "detr": detr,
    "segformer": segformer,
    "swin": swin,
    "wav2vec2": wav2vec2,
    "whisper": whisper,
}
