"""Networks for text and patches, as their libraries make them, in small."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.zoo.hugging_face import TransformerSize, bert, distilbert, gpt2, t5, vit
from tests.run.support.small_models import Specimen
from tests.zoo.drawn_text import DrawnText

NUM_WORDS = 40
NUM_TOKENS = 6
DRAWN = DrawnText(NUM_WORDS, NUM_TOKENS)
SMALL = TransformerSize(2, 16, 2, 24, NUM_WORDS, num_tokens=8, has_dropout=False)


class Translator(nn.Module):
    """Two LSTMs that read, two that write and look back at what was read."""

    def __init__(self, width: int = 8, num_words: int = NUM_WORDS) -> None:
        super().__init__()
        self.embed_source = nn.Embedding(num_words, width, padding_idx=0)
        self.read = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.read_again = nn.LSTM(width, width, batch_first=True)
        self.embed_target = nn.Embedding(num_words, width)
        self.write = nn.LSTM(width, width, batch_first=True)
        self.attend = nn.Linear(width, width, bias=False)
        self.write_again = nn.LSTM(2 * width, width, batch_first=True)
        self.head = nn.Linear(width, num_words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """From source_BS and what is written before each word, target_BT."""
        first, _ = self.read(self.embed_source(source))
        memory, state = self.read_again(first)
        x, _ = self.write(self.embed_target(target), state)
        scores = self.attend(x) @ memory.transpose(1, 2)
        scores = scores.masked_fill(source.eq(0)[:, None], float("-inf"))
        found = scores.softmax(-1) @ memory
        y, _ = self.write_again(torch.cat([x, found], -1))
        return cast(Tensor, self.head(x + y))


class TorchTransformer(nn.Module):
    """nn.Transformer between embeddings and a head."""

    def __init__(
        self,
        width: int = 8,
        num_words: int = NUM_WORDS,
        num_tokens: int = NUM_TOKENS,
    ) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.embed = nn.Embedding(num_words, width)
        self.transformer = nn.Transformer(
            width, 2, 1, 2, 2 * width, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(width, num_words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(
            self.num_tokens, dtype=self.head.weight.dtype
        )
        x = self.transformer(self.embed(source), self.embed(target), tgt_mask=causal)
        return cast(Tensor, self.head(x))


def with_noise(model: nn.Module) -> nn.Module:
    """Let no weight be zero.

    The gradient of a key's bias is nothing but rounding. Where the bias itself begins
    at zero it is nothing but rounding, too, and has no digits to compare.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_()
    return model


def labels(output: Any, targets: Tensor) -> Tensor:
    """Mean cross entropy over samples, of an output with logits."""
    return F.cross_entropy(output.logits, targets)


def words(output: Any, targets: Tensor) -> Tensor:
    """Mean cross entropy over words."""
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def own_loss(output: Any, targets: Any) -> Tensor:
    """The loss that the model computes itself, where it is given the labels."""
    return cast(Tensor, output.loss)


def _patches(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    x = torch.randn(count, 1, 8, 8, generator=rng, dtype=torch.float64)
    return {"pixel_values": x}, torch.randint(3, (count,), generator=rng)


TEXT = {
    "bert": Specimen(lambda: with_noise(bert(SMALL)), labels, DRAWN.sentences),
    "distilbert": Specimen(
        lambda: with_noise(distilbert(SMALL)), labels, DRAWN.sentences
    ),
    "gpt2": Specimen(lambda: with_noise(gpt2(SMALL)), words, DRAWN.text),
    "t5": Specimen(lambda: t5(SMALL, num_encoder_layers=1), own_loss, DRAWN.labelled),
    "vit": Specimen(
        lambda: with_noise(vit(SMALL, side=8, num_channels=1, dropout=0.2)),
        labels,
        _patches,
        is_random=True,
    ),
    "lstm": Specimen(Translator, words, DRAWN.pairs),
    "transformer": Specimen(lambda: with_noise(TorchTransformer()), words, DRAWN.pairs),
}
