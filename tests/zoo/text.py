"""Networks for text and patches, as their libraries make them, in small."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from tests.run.support.small_models import Specimen
from tests.zoo.drawn_text import DrawnText

NUM_WORDS = 40
NUM_TOKENS = 6
DRAWN = DrawnText(NUM_WORDS, NUM_TOKENS)


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


def bert() -> nn.Module:
    """Hugging Face's, for classification, with a mask of padding."""
    config = BertConfig(  # type: ignore[call-arg]
        num_hidden_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=24,
        vocab_size=NUM_WORDS,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return BertForSequenceClassification(config)


def distilbert() -> nn.Module:
    """Hugging Face's, for classification, with a mask of padding."""
    config = DistilBertConfig(  # type: ignore[call-arg]
        n_layers=2,
        dim=16,
        n_heads=2,
        hidden_dim=24,
        vocab_size=NUM_WORDS,
        max_position_embeddings=8,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        num_labels=3,
    )
    return DistilBertForSequenceClassification(config)


def gpt2() -> nn.Module:
    """Hugging Face's: the head is the embedding."""
    config = GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        vocab_size=NUM_WORDS,
        n_positions=8,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def t5() -> nn.Module:
    """Hugging Face's encoder and decoder, with one embedding for both and the head."""
    config = T5Config(  # type: ignore[call-arg]
        num_layers=1,
        num_decoder_layers=2,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_heads=2,
        vocab_size=NUM_WORDS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    """Hugging Face's, with dropout."""
    config = ViTConfig(  # type: ignore[call-arg]
        num_hidden_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_dropout_prob=0.2,
        num_labels=3,
    )
    return ViTForImageClassification(config)


def torch_transformer() -> nn.Module:
    """torch's own encoder and decoder."""
    return TorchTransformer()


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
    "bert": Specimen(lambda: with_noise(bert()), labels, DRAWN.sentences),
    "distilbert": Specimen(lambda: with_noise(distilbert()), labels, DRAWN.sentences),
    "gpt2": Specimen(lambda: with_noise(gpt2()), words, DRAWN.text),
    "t5": Specimen(t5, own_loss, DRAWN.labelled),
    "vit": Specimen(lambda: with_noise(vit()), labels, _patches, is_random=True),
    "lstm": Specimen(Translator, words, DRAWN.pairs),
    "transformer": Specimen(
        lambda: with_noise(torch_transformer()), words, DRAWN.pairs
    ),
}
