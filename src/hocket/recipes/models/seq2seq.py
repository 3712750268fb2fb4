"""A small translator: LSTMs that read, LSTMs that write, attention between them.

    source ─ embedding ─ LSTM ⇄ ─ LSTM ─ ... ──────┐ keys and values
                                                   ▼
    target ─ embedding ─ LSTM ─ queries ─▶ attention ─▶ LSTM ─ LSTM ─ ... ─ head

Only the first LSTM of the writer asks the attention, and what it finds goes to all that
follow, so that no step of time waits for the attention of the step before.

Shapes: B sentences, S words of the source, T of the target, W width, V words known.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn


class Seq2Seq(nn.Module):
    """Sentences (B, S) and the words so far (B, T) to scores of the next (B, T, V).

    Args:
        num_source_words: known of the language that is read.
        num_target_words: V, of the language that is written.
        width: W, even.
        num_layers: LSTMs of the reader, and as many of the writer.
        padding: the number of the word that fills short sentences; nobody looks at it.
        dropout: the probability, between all layers.

    Source: Wu et al., arXiv:1609.08144, section 3, with dot products (Luong et al.,
    arXiv:1508.04025, section 3.1) as attention.
    """

    def __init__(
        self,
        *,
        num_source_words: int,
        num_target_words: int,
        width: int,
        num_layers: int,
        padding: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.padding = padding
        self.source = nn.Embedding(num_source_words, width)
        self.reader = nn.ModuleList(
            _lstm(width, width // 2 if layer == 0 else width, both_ways=layer == 0)
            for layer in range(num_layers)
        )
        self.target = nn.Embedding(num_target_words, width)
        self.writer = nn.ModuleList(
            _lstm(width if layer == 0 else 2 * width, width)
            for layer in range(num_layers)
        )
        self.attention = Attention(width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width, num_target_words)

    def forward(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        """Score each next word of the target."""
        read_BSW = self.dropout(self.source(source_BS))
        for number, lstm in enumerate(self.reader):
            read_BSW = _passed(lstm, read_BSW, read_BSW if number else None)
            read_BSW = self.dropout(read_BSW)
        written_BTW = self.dropout(self.target(target_BT))
        written_BTW = self.dropout(self.writer[0](written_BTW)[0])
        hidden_BS = source_BS == self.padding
        found_BTW = self.attention(written_BTW, read_BSW, hidden_BS)
        for lstm in list(self.writer)[1:]:
            both_BT2W = torch.cat([written_BTW, found_BTW], -1)
            written_BTW = self.dropout(_passed(lstm, both_BT2W, written_BTW))
        score_BTV: Tensor = self.head(torch.cat([written_BTW, found_BTW], -1))
        return score_BTV


class Attention(nn.Module):
    """Where to look in the source: one dot product per pair of words.

    Args:
        width: W.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)

    def forward(
        self, asking_BTW: Tensor, read_BSW: Tensor, hidden_BS: Tensor
    ) -> Tensor:
        """For each word that asks, the mean of the words read, by their weights.

        Args:
            asking_BTW: what the writer has.
            read_BSW: what the reader has.
            hidden_BS: true where nobody may look; never a whole row.
        """
        weight_BTS = self.query(asking_BTW) @ read_BSW.transpose(1, 2)
        weight_BTS = weight_BTS / sqrt(read_BSW.shape[-1])
        weight_BTS = weight_BTS.masked_fill(hidden_BS[:, None, :], float("-inf"))
        found_BTW: Tensor = weight_BTS.softmax(-1) @ read_BSW
        return found_BTW


def _lstm(before: int, width: int, *, both_ways: bool = False) -> nn.LSTM:
    return nn.LSTM(before, width, batch_first=True, bidirectional=both_ways)


def _passed(lstm: nn.Module, x_BTX: Tensor, around_BTW: Tensor | None) -> Tensor:
    """Through one LSTM, added to what goes around it."""
    y_BTW: Tensor = lstm(x_BTX)[0]
    return y_BTW if around_BTW is None else y_BTW + around_BTW
