"""Text as bytes, and the models that guess each next one: a GPT, and LSTMs.

    [data]
    kind = "function"
    function = "examples.zoo.text:windows"
    path = "book.txt"

    [model]
    kind = "function"
    function = "examples.zoo.text:gpt"

Shapes: B samples, T bytes, W width, V = 256 values of a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from hocket.errors import DataError
from hocket.recipes.models.make import Blocks
from hocket.run.data.batch import digest
from hocket.run.data.samples import EpochRandom

NUM_BYTE_VALUES: Final = 256
_EMBEDDING_STD: Final = 0.02


@dataclass(frozen=True, slots=True)
class TextWindows:
    """Windows of one part of a file, one behind the other.

    Args:
        windows: (N, window_bytes + 1) bytes; a view of the file's.
        fingerprint: the digest of some thousand bytes all over the file, which may be
            larger than the memory.
    """

    windows: Tensor
    fingerprint: int

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.windows)

    @property
    def window_bytes(self) -> int:
        """T."""
        return self.windows.shape[1] - 1

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B, T), int64; text is not augmented."""
        del draw
        return self.windows[rows, :-1].long()

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B, T), int64: each byte's next one."""
        del draw
        return self.windows[rows, 1:].long()


def windows(
    path: str, window_bytes: int = 128, validation_fraction: float = 0.1
) -> tuple[TextWindows, TextWindows]:
    """Load windows for training and for validation; the file is mapped, not read.

    Args:
        path: any file.
        window_bytes: T.
        validation_fraction: the last part of the file, for validation.

    Raises:
        DataError: the file cannot be read, or is too short for one window in each part.
    """
    try:
        num_bytes = Path(path).stat().st_size
        num_validation = round(validation_fraction * num_bytes)
        if min(num_validation, num_bytes - num_validation) > window_bytes:
            data = torch.from_file(path, size=num_bytes, dtype=torch.uint8)
            cut = num_bytes - num_validation
            training, validation = (
                TextWindows(x.unfold(0, window_bytes + 1, window_bytes), digest(data))
                for x in (data[:cut], data[cut:])
            )
            return training, validation
    except (OSError, RuntimeError) as error:
        raise DataError(f"{path} cannot be read as a file: {error}") from error
    raise DataError(
        f"{path} is too short: of its {num_bytes} bytes, {num_validation} are for "
        f"validation (data.validation_fraction {validation_fraction:g}) and the others "
        f"for training, and each part needs at least {window_bytes + 1} "
        f"(data.window_bytes {window_bytes} and one more)"
    )


def loss(score_BTV: Tensor, target_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy over all bytes of all windows, in nats."""
    return functional.cross_entropy(score_BTV.flatten(0, 1), target_BT.flatten())


def metrics(score_BTV: Tensor, target_BT: Tensor) -> dict[str, Tensor]:
    """Return the cross-entropy in bits, and the share of correct predictions."""
    return {
        "bits_per_byte": loss(score_BTV, target_BT) / log(2),
        "accuracy": (score_BTV.argmax(-1) == target_BT).float().mean(),
    }


def gpt(
    data: Any,
    width: int = 64,
    num_blocks: int = 6,
    num_heads: int = 4,
    mlp_width: int = 128,
    dropout: float = 0.0,
    tie_weights: bool = False,
) -> nn.Module:
    """A GPT for windows of bytes.

    Args:
        data: has `window_bytes`.
        width: W, a multiple of `num_heads`.
        num_blocks: pairs of attention and MLP.
        num_heads: heads of each attention.
        mlp_width: features inside each MLP.
        dropout: the probability, where each half of a block joins the residual stream.
        tie_weights: whether the head's weights are the byte embedding's.
    """
    blocks = Blocks(width, num_blocks, num_heads, mlp_width, dropout)
    return Gpt(window_bytes=data.window_bytes, blocks=blocks, tie_weights=tie_weights)


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
        self, *, window_bytes: int, blocks: Blocks, tie_weights: bool = False
    ) -> None:
        super().__init__()
        self.window_bytes = window_bytes
        self.embedding = nn.Embedding(NUM_BYTE_VALUES, blocks.width)
        positions = torch.randn(window_bytes, blocks.width)
        self.positions = nn.Parameter(_EMBEDDING_STD * positions)
        self.blocks = blocks.make(causal=True)
        self.norm = nn.LayerNorm(blocks.width)
        self.head = nn.Linear(blocks.width, NUM_BYTE_VALUES, bias=False)
        nn.init.normal_(self.embedding.weight, std=_EMBEDDING_STD)
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
    """Sample bytes after the prompt, each from the model's distribution.

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


class Rnn(nn.Module):
    """Bytes (B, T) to scores of each next byte (B, T, V); the state begins at zero.

    Args:
        width: W.
        num_layers: LSTM layers, each a module, so that a cut may lie between any two.
        dropout: the probability, between layers.

    Source: Oh et al., EuroSys'22, section 8 (RNN-16 has 16 layers of width 1024).
    """

    def __init__(
        self, width: int = 1024, num_layers: int = 16, dropout: float = 0.0
    ) -> None:
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
