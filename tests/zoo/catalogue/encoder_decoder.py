"""Encoders with decoders, of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import transformers

from tests.model.support.stages_by_hand import Case
from tests.zoo.catalogue.text import NUM_WORDS, words

SIZES: Final[dict[str, Any]] = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "vocab_size": NUM_WORDS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}


def translator(config: str, model: str, **settings: Any) -> Case:
    """Takes a text and the one to predict."""
    made = getattr(transformers, config)(**{**SIZES, **settings})
    keywords = {
        "input_ids": words(),
        "attention_mask": torch.ones(4, 8, dtype=torch.long),
        "decoder_input_ids": words(6),
        "use_cache": False,
    }
    return Case(getattr(transformers, model)(made).train(), (), keywords)


CASES: Final[dict[str, Callable[[], Case]]] = {
    "bart": partial(translator, "BartConfig", "BartForConditionalGeneration"),
    "marian": partial(translator, "MarianConfig", "MarianMTModel"),
    "pegasus": partial(translator, "PegasusConfig", "PegasusForConditionalGeneration"),
    "switch": partial(
        translator,
        "SwitchTransformersConfig",
        "SwitchTransformersForConditionalGeneration",
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        num_experts=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    ),
}
