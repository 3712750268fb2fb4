"""A translator: LSTMs that read, LSTMs that write, attention between them.

    source ─ embedding ─ LSTM ⇄ ─ LSTM ─ ... ──────┐ keys and values
                                                   ▼
    target ─ embedding ─ LSTM ─ queries ─▶ attention ─▶ LSTM ─ LSTM ─ ... ─ head

Shapes: B sentences, S words of the source, T of the target, W width, V words known.
Source: Wu et al., arXiv:1609.08144, section 3; Luong et al., arXiv:1508.04025.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PAD = 0


class Translator(nn.Module):
    """Sentences (B, S) and the words so far (B, T) to scores of the next (B, T, V)."""

    def __init__(
        self, num_words: int, width: int, num_layers: int, dropout: float
    ) -> None:
        super().__init__()
        first = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        more = range(num_layers - 1)
        lstms = [nn.LSTM(width, width, batch_first=True) for _ in more]
        self.source = nn.Embedding(num_words, width)
        self.reader = nn.ModuleList([first, *lstms])
        lstms = [nn.LSTM(2 * width, width, batch_first=True) for _ in more]
        self.target = nn.Embedding(num_words, width)
        self.writer = nn.LSTM(width, width, batch_first=True)
        self.more_writers = nn.ModuleList(lstms)
        self.query = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width, num_words)

    def forward(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        read_BSW = self.dropout(self.source(source_BS))
        for layer, lstm in enumerate(self.reader):
            passed_BSW = lstm(read_BSW)[0]
            read_BSW = self.dropout(passed_BSW + read_BSW if layer else passed_BSW)
        written_BTW = self.dropout(self.target(target_BT))
        written_BTW = self.dropout(self.writer(written_BTW)[0])
        # Only the first writer asks: no word waits for the attention of the one before.
        is_word_B1S = (source_BS != PAD)[:, None, :]
        found_BTW = F.scaled_dot_product_attention(
            self.query(written_BTW), read_BSW, read_BSW, attn_mask=is_word_B1S
        )
        for lstm in self.more_writers:
            passed_BTW = lstm(torch.cat([written_BTW, found_BTW], -1))[0]
            written_BTW = self.dropout(passed_BTW + written_BTW)
        score_BTV: Tensor = self.head(torch.cat([written_BTW, found_BTW], -1))
        return score_BTV


def _nats(score_BTV: Tensor, word_BT: Tensor) -> Tensor:
    """(B, T); nothing for padding."""
    score_BVT = score_BTV.transpose(1, 2)
    return F.cross_entropy(score_BVT, word_BT, ignore_index=PAD, reduction="none")


def loss(score_BTV: Tensor, word_BT: Tensor) -> Tensor:
    """Mean nats per sentence: sentences weigh the same however the batch is cut."""
    return _nats(score_BTV, word_BT).sum(1).mean()


def metrics(score_BTV: Tensor, word_BT: Tensor) -> dict[str, Tensor]:
    """Share of words guessed right and nats per word, as means over sentences."""
    is_word_BT = word_BT != PAD
    num_words_B = is_word_BT.sum(1).clamp(min=1)
    right_BT = (score_BTV.argmax(-1) == word_BT) & is_word_BT
    nats_B = _nats(score_BTV, word_BT).sum(1) / num_words_B
    accuracy_B = right_BT.sum(1) / num_words_B
    return {"accuracy": accuracy_B.mean(), "nats_per_word": nats_B.mean()}
