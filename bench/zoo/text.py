"""Networks for text and patches, with the proportions and dropout of their kind."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from bench.zoo.architecture import Architecture
from tests.run.support.small_models import TiedTransformer, tokens
from tests.zoo.drawn_text import DrawnText
from tests.zoo.text import TorchTransformer, Translator, labels, own_loss, words

NUM_WORDS: Final = 1000
NUM_TOKENS: Final = 32
DRAWN: Final = DrawnText(NUM_WORDS, NUM_TOKENS)


def bert() -> nn.Module:
    """Four layers, 256 wide."""
    config = BertConfig(  # type: ignore[call-arg]
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        intermediate_size=1024,
        vocab_size=NUM_WORDS,
        max_position_embeddings=NUM_TOKENS,
        num_labels=3,
    )
    return BertForSequenceClassification(config)


def distilbert() -> nn.Module:
    """Four layers, 256 wide."""
    config = DistilBertConfig(  # type: ignore[call-arg]
        n_layers=4,
        dim=256,
        n_heads=4,
        hidden_dim=1024,
        vocab_size=NUM_WORDS,
        max_position_embeddings=NUM_TOKENS,
        num_labels=3,
    )
    return DistilBertForSequenceClassification(config)


def gpt2() -> nn.Module:
    """Four layers, 256 wide; the head is the embedding."""
    config = GPT2Config(
        n_layer=4,
        n_embd=256,
        n_head=4,
        vocab_size=NUM_WORDS,
        n_positions=NUM_TOKENS,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def t5() -> nn.Module:
    """Three layers that read and three that write, 192 wide, one embedding for all."""
    config = T5Config(  # type: ignore[call-arg]
        num_layers=3,
        num_decoder_layers=3,
        d_model=192,
        d_kv=48,
        d_ff=768,
        num_heads=4,
        vocab_size=NUM_WORDS,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    """Four layers, 192 wide, patches of 4 x 4."""
    config = ViTConfig(  # type: ignore[call-arg]
        num_hidden_layers=4,
        hidden_size=192,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=32,
        patch_size=4,
        num_channels=3,
        hidden_dropout_prob=0.1,
        num_labels=3,
    )
    return ViTForImageClassification(config)


def _masked(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    padded = DRAWN.padded(count, rng)
    mask = padded["attention_mask"] == 0
    inputs = {"tokens": padded["input_ids"], "mask": mask, "flavour": "plain"}
    return inputs, DRAWN.tokens(count, rng)


def _patches(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    x = torch.randn(count, 3, 32, 32, generator=rng)
    return {"pixel_values": x}, torch.randint(3, (count,), generator=rng)


ARCHITECTURES: Final = {
    "bert": Architecture(bert, labels, DRAWN.sentences, 32),
    "distilbert": Architecture(distilbert, labels, DRAWN.sentences, 32),
    "gpt2": Architecture(gpt2, words, DRAWN.text, 32),
    "t5": Architecture(t5, own_loss, DRAWN.labelled, 32),
    "vit": Architecture(vit, labels, _patches, 16),
    "lstm": Architecture(lambda: Translator(128, NUM_WORDS), words, DRAWN.pairs, 64),
    "transformer": Architecture(
        lambda: TorchTransformer(256, NUM_WORDS, NUM_TOKENS), words, DRAWN.pairs, 32
    ),
    "tied": Architecture(
        lambda: TiedTransformer(0.1, 256, NUM_WORDS),
        tokens,
        _masked,
        32,
        ddp={"find_unused_parameters": True},
    ),
}
