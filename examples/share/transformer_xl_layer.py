"""A layer of Transformer-XL: it remembers its inputs of the segment before.

    memory (last M)      segment (T words)
    ───────────────┐     ┌───────────────
                   └──┬──┘
       keys, values: both; queries: the segment; positions: how far apart they are

Shapes: B samples, T words of the segment, M words of memory, S = M + T, W width.
Source: Dai et al., arXiv:1901.02860, section 3.3 and appendix B (the shift).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """Attention by relative positions, and a perceptron; normalized after each."""

    def __init__(self, width: int, num_heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, size = num_heads, width // num_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.position = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.bias_content = nn.Parameter(torch.zeros(num_heads, 1, size))
        self.bias_position = nn.Parameter(torch.zeros(num_heads, 1, size))
        ends = nn.Linear(width, inner), nn.ReLU(), nn.Dropout(dropout)
        self.inner = nn.Sequential(*ends, nn.Linear(inner, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTW: Tensor, memory_BMW: Tensor, place_SW: Tensor) -> Tensor:
        both_BSW = torch.cat([memory_BMW, x_BTW], 1)
        query = self._heads(self.query(x_BTW))
        key, value = map(self._heads, self.key_value(both_BSW).chunk(2, -1))
        place = self._heads(self.position(place_SW)[None])
        score = (query + self.bias_content) @ key.mT
        score = score + _shifted((query + self.bias_position) @ place.mT)
        num_words, num_all = score.shape[-2:]
        later = torch.ones(num_words, num_all, dtype=torch.bool, device=score.device)
        later = later.triu(1 + num_all - num_words)
        score = score / key.shape[-1] ** 0.5
        share = self.dropout(score.masked_fill(later, float("-inf")).softmax(-1))
        found = (share @ value).transpose(1, 2).flatten(2)
        x_BTW = self.norms[0](x_BTW + self.dropout(self.out(found)))
        done: Tensor = self.norms[1](x_BTW + self.dropout(self.inner(x_BTW)))
        return done

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _shifted(score_BHTS: Tensor) -> Tensor:
    """Move row i of T by T - 1 - i to the left: from distances to places."""
    *_, num_rows, num_columns = score_BHTS.shape
    padded = nn.functional.pad(score_BHTS, (1, 0)).flatten(-2)
    return padded[..., num_rows:].unflatten(-1, (num_rows, num_columns))


def distances(num_all: int, x_BTW: Tensor) -> Tensor:
    """Sines and cosines of the distances S - 1, ..., 1, 0 (S, W)."""
    width = x_BTW.shape[2]
    far = torch.arange(num_all - 1, -1, -1.0).to(x_BTW)
    rate = 10_000 ** (-torch.arange(0, width, 2.0).to(x_BTW) / width)
    angle = far[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], -1)
