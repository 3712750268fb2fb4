"""Networks for text and patches, with the proportions and dropout of their kind."""

from __future__ import annotations

from typing import Any, Final

import torch

from bench.zoo.architecture import Architecture
from bench.zoo.hugging_face import TransformerSize, bert, distilbert, gpt2, t5, vit
from tests.run.support.small_models import TiedTransformer, tokens
from tests.zoo.drawn_text import DrawnText
from tests.zoo.text import TorchTransformer, Translator, labels, own_loss, words

NUM_WORDS: Final = 1000
NUM_TOKENS: Final = 32
DRAWN: Final = DrawnText(NUM_WORDS, NUM_TOKENS)

LARGE: Final = TransformerSize(4, 256, 4, 1024, NUM_WORDS, NUM_TOKENS)
T5: Final = TransformerSize(3, 192, 4, 768, NUM_WORDS, NUM_TOKENS)
VIT: Final = TransformerSize(4, 192, 3, 768, NUM_WORDS, NUM_TOKENS)


def _masked(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    padded = DRAWN.padded(count, rng)
    mask = padded["attention_mask"] == 0
    inputs = {"tokens": padded["input_ids"], "mask": mask, "flavour": "plain"}
    return inputs, DRAWN.tokens(count, rng)


def _patches(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    x = torch.randn(count, 3, 32, 32, generator=rng)
    return {"pixel_values": x}, torch.randint(3, (count,), generator=rng)


ARCHITECTURES: Final = {
    "bert": Architecture(lambda: bert(LARGE), labels, DRAWN.sentences, 32),
    "distilbert": Architecture(lambda: distilbert(LARGE), labels, DRAWN.sentences, 32),
    "gpt2": Architecture(lambda: gpt2(LARGE), words, DRAWN.text, 32),
    "t5": Architecture(
        lambda: t5(T5, num_encoder_layers=3), own_loss, DRAWN.labelled, 32
    ),
    "vit": Architecture(
        lambda: vit(VIT, side=32, num_channels=3, dropout=0.1), labels, _patches, 16
    ),
    "lstm": Architecture(lambda: Translator(128, NUM_WORDS), words, DRAWN.pairs, 64),
    "transformer": Architecture(
        lambda: TorchTransformer(256, NUM_WORDS, NUM_TOKENS), words, DRAWN.pairs, 32
    ),
    "tied": Architecture(
        lambda: TiedTransformer(0.1, 256, NUM_WORDS),
        tokens,
        _masked,
        32,
        ddp={"find_unused_parameters": True},
    ),
}
