"""BERT with its head for masked pieces, and with the hidden states before it.

Shapes: B samples, T pieces, V entries of the vocabulary, W width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


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
