"""Hugging Face's networks for text and patches, by size; for benches and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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

NUM_CLASSES = 3


@dataclass(frozen=True, slots=True)
class TransformerSize:
    """The size of a network.

    Args:
        num_layers: the number of layers; of a decoder, if it has one.
        width: features per token.
        num_heads: heads of each attention.
        mlp_width: features inside each MLP.
        num_words: the size of the vocabulary.
        num_tokens: the longest text.
        has_dropout: keeps the library's dropout; without it, there is none.
    """

    num_layers: int
    width: int
    num_heads: int
    mlp_width: int
    num_words: int
    num_tokens: int
    has_dropout: bool = True

    def without_dropout(self, *names: str) -> dict[str, Any]:
        """Return these settings as 0, unless the library's dropout is kept."""
        return {} if self.has_dropout else dict.fromkeys(names, 0.0)


def bert(size: TransformerSize) -> nn.Module:
    """BERT for classification, with a mask of padding."""
    config = BertConfig(  # type: ignore[call-arg]
        num_hidden_layers=size.num_layers,
        hidden_size=size.width,
        num_attention_heads=size.num_heads,
        intermediate_size=size.mlp_width,
        vocab_size=size.num_words,
        max_position_embeddings=size.num_tokens,
        num_labels=NUM_CLASSES,
        **size.without_dropout("hidden_dropout_prob", "attention_probs_dropout_prob"),
    )
    return BertForSequenceClassification(config)


def distilbert(size: TransformerSize) -> nn.Module:
    """DistilBERT for classification, with a mask of padding."""
    config = DistilBertConfig(  # type: ignore[call-arg]
        n_layers=size.num_layers,
        dim=size.width,
        n_heads=size.num_heads,
        hidden_dim=size.mlp_width,
        vocab_size=size.num_words,
        max_position_embeddings=size.num_tokens,
        num_labels=NUM_CLASSES,
        **size.without_dropout("dropout", "attention_dropout", "seq_classif_dropout"),
    )
    return DistilBertForSequenceClassification(config)


def gpt2(size: TransformerSize) -> nn.Module:
    """GPT-2, whose head is the embedding."""
    config = GPT2Config(
        n_layer=size.num_layers,
        n_embd=size.width,
        n_head=size.num_heads,
        vocab_size=size.num_words,
        n_positions=size.num_tokens,
        bos_token_id=0,
        eos_token_id=0,
        **size.without_dropout("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    )
    return GPT2LMHeadModel(config)


def t5(size: TransformerSize, *, num_encoder_layers: int) -> nn.Module:
    """T5, with one embedding for encoder, decoder and head."""
    config = T5Config(  # type: ignore[call-arg]
        num_layers=num_encoder_layers,
        num_decoder_layers=size.num_layers,
        d_model=size.width,
        d_kv=size.width // size.num_heads,
        d_ff=size.mlp_width,
        num_heads=size.num_heads,
        vocab_size=size.num_words,
        decoder_start_token_id=0,
        pad_token_id=0,
        **size.without_dropout("dropout_rate"),
    )
    return T5ForConditionalGeneration(config)


def vit(
    size: TransformerSize, *, side: int, num_channels: int, dropout: float
) -> nn.Module:
    """ViT for classification, with patches of 4 x 4 pixels."""
    config = ViTConfig(  # type: ignore[call-arg]
        num_hidden_layers=size.num_layers,
        hidden_size=size.width,
        num_attention_heads=size.num_heads,
        intermediate_size=size.mlp_width,
        image_size=side,
        patch_size=4,
        num_channels=num_channels,
        hidden_dropout_prob=dropout,
        num_labels=NUM_CLASSES,
    )
    return ViTForImageClassification(config)
