"""A recurrent network on bytes: an embedding, LSTM layers, a head.

Shapes: B samples, T bytes, W width, V = 256 values of a byte.
"""

from __future__ import annotations

from torch import Tensor, nn

from hocket.recipes.models.gpt import NUM_BYTE_VALUES


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
