"""Transformer-XL on words; the loss is an adaptive softmax.

Sizes are those of the paper's standard model for WikiText-103, with one embedding for
all words in place of the adaptive one.

Source: Dai et al., arXiv:1901.02860; Grave et al., arXiv:1609.04309.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from examples.share.transformer_xl_layer import Layer, distances

STANDARD: Final = {"width": 410, "layers": 16, "heads": 10, "inner": 2100, "words": 150}
SMALL: Final = {"width": 32, "layers": 2, "heads": 2, "inner": 64, "words": 16}


class Words(nn.Module):
    """Words (B, T) and memories to the mean loss of the next words, and memories."""

    def __init__(
        self, num_ids: int, size: dict[str, int], dropout: float = 0.1
    ) -> None:
        super().__init__()
        width, self.memory_words = size["width"], size["words"]
        self.embedding = nn.Embedding(num_ids, width)
        layer = width, size["heads"], size["inner"], dropout
        self.layers = nn.ModuleList(Layer(*layer) for _ in range(size["layers"]))
        often = [x for x in (20_000, 40_000, 200_000) if x < num_ids - 1]
        cuts = often or [max(1, num_ids // 2)]
        self.head = nn.AdaptiveLogSoftmaxWithLoss(width, num_ids, cuts)
        self.dropout = nn.Dropout(dropout)

    def hidden(self, word_BT: Tensor, memory: list[Tensor] | None) -> Any:
        """Return the last layer's output, and what each layer remembers."""
        x_BTW = self.dropout(self.embedding(word_BT))
        memory = memory or [x_BTW[:, :0] for _ in self.layers]
        num_all = memory[0].shape[1] + x_BTW.shape[1]
        place_SW = distances(num_all, x_BTW)
        kept = []
        for layer, own_BMW in zip(self.layers, memory, strict=True):
            both_BSW = torch.cat([own_BMW, x_BTW], 1)
            kept.append(both_BSW[:, -self.memory_words :].detach())
            x_BTW = layer(x_BTW, own_BMW, place_SW)
        return self.dropout(x_BTW), kept

    def forward(self, word_BT: Tensor, next_BT: Tensor, memory: Any) -> Any:
        hidden_BTW, kept = self.hidden(word_BT, memory)
        with torch.autocast(
            hidden_BTW.device.type, enabled=False
        ):  # sums of logarithms
            found = self.head(hidden_BTW.float().flatten(0, 1), next_BT.flatten())
        return found.loss, kept
