"""A byte-level GPT: bytes, positions, causal blocks, head; and text sampled from it.

Shapes: B samples, T bytes, W width, V = 256 values of a byte.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from hocket.recipes.models.transformer import Blocks

NUM_BYTE_VALUES: Final = 256
EMBEDDING_STD: Final = 0.02


class Gpt(nn.Module):
    """Bytes (B, T) to scores of each next byte (B, T, V). Pre-norm, learned positions.

    Args:
        window_bytes: the longest T.
        blocks: the sizes of the blocks; W is their width.
        tie_weights: whether the head's weights are the byte embedding's.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners",
    2019, section 2.3.
    """

    def __init__(
        self,
        *,
        window_bytes: int,
        blocks: Blocks,
        tie_weights: bool = False,
    ) -> None:
        super().__init__()
        self.window_bytes = window_bytes
        self.embedding = nn.Embedding(NUM_BYTE_VALUES, blocks.width)
        self.positions = nn.Parameter(
            EMBEDDING_STD * torch.randn(window_bytes, blocks.width)
        )
        self.blocks = blocks.make(causal=True)
        self.norm = nn.LayerNorm(blocks.width)
        self.head = nn.Linear(blocks.width, NUM_BYTE_VALUES, bias=False)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        if tie_weights:
            self.head.weight = self.embedding.weight

    def forward(self, byte_BT: Tensor) -> Tensor:
        """Score each next byte."""
        x_BTW = self.embedding(byte_BT) + self.positions[: byte_BT.shape[1]]
        score_BTV: Tensor = self.head(self.norm(self.blocks(x_BTW)))
        return score_BTV


@torch.no_grad()
def generate(
    model: Gpt, prompt: bytes, num_bytes: int, generator: torch.Generator
) -> bytes:
    """Sample `num_bytes` bytes after the prompt, each from the model's distribution.

    Args:
        model: the model; set to evaluation mode.
        prompt: at least one byte.
        num_bytes: the number of bytes to sample.
        generator: the generator to sample with.
    """
    model.eval()
    text = list(prompt)
    for _ in range(num_bytes):
        byte_1T = torch.tensor([text[-model.window_bytes :]])
        probability_V = model(byte_1T)[0, -1].softmax(0)
        text.append(int(torch.multinomial(probability_V, 1, generator=generator)))
    return bytes(text[len(prompt) :])


# A recurrent network on bytes: an embedding, LSTM layers, a head.
#
# Shapes: B samples, T bytes, W width, V = 256 values of a byte.
class Rnn(nn.Module):
    """Bytes (B, T) to scores of each next byte (B, T, V); the state begins at zero.

    Args:
        width: W.
        num_layers: LSTM layers; out-of-order backprop's RNN-16 has 16 of width 1024.
        dropout: the probability, between layers.

    Source: Oh et al., EuroSys'22, section 8; Hochreiter and Schmidhuber, "Long
    Short-Term Memory", 1997.
    """

    def __init__(self, *, width: int, num_layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTE_VALUES, width)
        self.layers = nn.Sequential(*(LstmLayer(width) for _ in range(num_layers)))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, NUM_BYTE_VALUES)

    def forward(self, byte_BT: Tensor) -> Tensor:
        """Score each next byte."""
        x_BTW = self.embedding(byte_BT)
        for layer in self.layers:
            x_BTW = self.dropout(layer(x_BTW))
        score_BTV: Tensor = self.head(x_BTW)
        return score_BTV


class LstmLayer(nn.Module):
    """One LSTM layer that returns its outputs, not its state.

    Args:
        width: features of its input and of its output.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Run over all bytes, first to last."""
        output_BTW: Tensor = self.lstm(x_BTW)[0]
        return output_BTW
