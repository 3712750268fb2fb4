"""BERT of the package transformers, with a head for classes, spans or masked pieces.

    [model]
    kind = "function"
    function = "examples.zoo.bert:bert"
    width = 768

It takes the vocabulary and lengths from the data, and is Hugging Face's own class, so
that weights can be exchanged with it.

Shapes: B samples, T pieces, V entries of the vocabulary, W width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
)

from hocket.errors import DataError


def bert(
    data: Any,
    width: int = 64,
    num_blocks: int = 6,
    num_heads: int = 4,
    mlp_width: int = 128,
    dropout: float = 0.0,
    pretrained: str | None = None,
) -> nn.Module:
    """A BERT with the head that the data ask for.

    Args:
        data: has `num_pieces`, `num_tokens` and `head`: "classes" (of which it has
            `num_classes`), "spans" or "masked".
        width: features of each piece; a multiple of `num_heads`.
        num_blocks: pairs of attention and MLP.
        num_heads: heads of each attention.
        mlp_width: features inside each MLP.
        dropout: the probability, everywhere.
        pretrained: a folder in Hugging Face's form to begin with.

    Raises:
        DataError: pretrained weights are missing, or of other sizes.
    """
    config = BertConfig(
        vocab_size=data.num_pieces,
        hidden_size=width,
        num_hidden_layers=num_blocks,
        num_attention_heads=num_heads,
        intermediate_size=mlp_width,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        max_position_embeddings=max(512, data.num_tokens),
    )
    match data.head:
        case "masked":
            return MaskedBert(_made(BertForMaskedLM, config, pretrained))
        case "spans":
            return _made(BertForQuestionAnswering, config, pretrained)
        case _:
            config.num_labels = data.num_classes
            return _made(BertForSequenceClassification, config, pretrained)


def _made(kind: type[Any], config: BertConfig, pretrained: str | None) -> nn.Module:
    """Make a model; its weights are never read from a pickle, nor from the network.

    Raises:
        DataError: there are no weights, or their sizes differ.
    """
    if pretrained is None:
        model: nn.Module = kind(config)
        return model
    if not Path(pretrained, "model.safetensors").is_file():
        raise DataError(
            f"model.pretrained: {pretrained} has no model.safetensors: download the "
            "files of a BERT (https://huggingface.co/google-bert/bert-base-uncased) "
            "there"
        )
    try:
        model = kind.from_pretrained(
            pretrained, config=config, local_files_only=True, use_safetensors=True
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(
            f"model.pretrained: the weights in {pretrained} do not fit a BERT of the "
            f"recipe's sizes: {error}"
        ) from error
    return model.train()  # it is in evaluation mode, without dropout


class MaskedBert(nn.Module):
    """Ids (B, T) to `logits` (B, T, V) and `hidden_states` (B, T, W), the last ones.

    Names of parameters are those of Hugging Face's class.

    Args:
        model: a `transformers.BertForMaskedLM`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.bert: nn.Module = model.bert
        self.cls: nn.Module = model.cls

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Score the pieces."""
        hidden_BTW = self.bert(input_ids=input_ids).last_hidden_state
        return {"logits": self.cls(hidden_BTW), "hidden_states": hidden_BTW}
