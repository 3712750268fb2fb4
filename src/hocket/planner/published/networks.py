"""Networks of published experiments, counted by hand: no framework makes them.

A layer is its matrix products, and the bytes that everything else reads and writes:

    attention   x ─▶ q k v ─▶ scores ─▶ context ─▶ out        per sample and token
    mlp         x ─▶ wide ─▶ narrow                           of a transformer's block

Attention and MLP are layers of their own, so that a cut may go between them. All
numbers are float32, as the experiments were.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from hocket.planner.counted import LayerOps, Ops
from hocket.planner.work import Affine, Weights

_FLOAT: Final = 4  # bytes
_STATES: Final = 2  # of Adam, per weight
_NOTHING: Final = Affine(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of one sample: `rows` x `inner` times `inner` x `columns`.

    Args:
        rows: the rows, which grow with the samples.
        inner: the inner dimension of both factors.
        columns: the columns of the second factor.
        has_weights: the second factor is weights, and not another activation.
        num_times: done one after another, each waiting for the one before.
    """

    rows: int
    inner: int
    columns: int
    has_weights: bool = True
    num_times: int = 1


@dataclass(frozen=True, slots=True)
class CountedLayer:
    """The operators and weights of one layer.

    Args:
        name: the layer's name.
        products: the matrix products, in order.
        other_floats: numbers that all else reads and writes in a forward, per sample.
        kept_floats: from the forward for the backward, per sample.
        received_floats: numbers of its input, per sample.
        num_weights: beside those of the products.
        num_states: the optimizer's state per weight.
    """

    name: str
    products: tuple[Product, ...]
    other_floats: int
    kept_floats: int
    received_floats: int
    num_weights: int = 0
    num_states: int = _STATES

    @property
    def weights(self) -> int:
        """The number of trained weights."""
        own = (p.inner * p.columns for p in self.products if p.has_weights)
        return self.num_weights + sum(own)

    def ops(self) -> LayerOps:
        """Return the operators for `CountedCosts`."""
        forward = [*self._forward()]
        back = [*self._input_grad()]
        num_bytes = _FLOAT * self.weights
        received = Affine(0.0, _FLOAT * self.received_floats)
        states = self.num_states * num_bytes
        weights = Weights(self.name, num_bytes, num_bytes, states)
        return LayerOps(
            self.name,
            _ops(forward),
            _ops(back),
            _ops([*back, *self._weight_grad()]),
            activation_bytes=Affine(0.0, _FLOAT * self.kept_floats),
            kept_input_bytes=_NOTHING,
            received_bytes=received,
            received_grad_bytes=received,
            weights=(weights,),
        )

    def _forward(self) -> Iterator[_Op]:
        for product in self.products:
            for _ in range(product.num_times):
                yield _product(product)
        yield _Op(0.0, 0.0, _FLOAT * self.other_floats)

    def _input_grad(self) -> Iterator[_Op]:
        for product in self.products:
            for _ in range(product.num_times):
                yield _product(product)
                if not product.has_weights:  # the gradient of the other factor, too
                    yield _product(product)
        yield _Op(0.0, 0.0, 2 * _FLOAT * self.other_floats)

    def _weight_grad(self) -> Iterator[_Op]:
        """Return the operators of all times at once: nothing waits."""
        for product in self.products:
            if product.has_weights:
                op = _product(product)
                times = product.num_times
                yield _Op(times * op.flops, op.fixed_bytes, times * op.sample_bytes)


@dataclass(frozen=True, slots=True)
class _Op:
    """One operator: FLOPs and bytes per sample, and bytes whatever the samples."""

    flops: float
    fixed_bytes: float
    sample_bytes: float


def _product(product: Product) -> _Op:
    rows, inner, columns = product.rows, product.inner, product.columns
    second = _FLOAT * inner * columns
    moved = _FLOAT * rows * (inner + columns)
    if product.has_weights:
        return _Op(2.0 * rows * inner * columns, second, moved)
    return _Op(2.0 * rows * inner * columns, 0.0, moved + second)


def _ops(ops: list[_Op]) -> Ops:
    nothing = [0.0] * len(ops)
    fixed, per_sample = [op.fixed_bytes for op in ops], [op.sample_bytes for op in ops]
    return Ops(
        np.array([nothing, [op.flops for op in ops]]),
        np.array([fixed, per_sample]),
        np.array([nothing, per_sample]),
    )


def transformer(
    num_blocks: int,
    width: int,
    num_heads: int,
    num_tokens: int,
    *,
    num_words: int,
    num_scored: int,
) -> tuple[CountedLayer, ...]:
    """An embedding, blocks of attention and MLP, and scores for some of the tokens.

    FLOPs and kept bytes of a block are those of Korthikanti et al., arXiv:2205.05198,
    sections 4.1 and appendix A: 24 T H^2 + 4 T^2 H, and 34 H + 5 A T per token in half
    precision, which are twice as many bytes here.

    Args:
        num_blocks: each two layers.
        width: H; the MLP is four times as wide.
        num_heads: A.
        num_tokens: T, of a sample.
        num_words: the size of the vocabulary.
        num_scored: tokens for which every word is scored; 0 for a classifier's two.
    """
    tokens_by_width = num_tokens * width
    scores = num_heads * num_tokens**2
    attention = (
        Product(num_tokens, width, 3 * width),
        Product(num_heads * num_tokens, width // num_heads, num_tokens, False),
        Product(num_heads * num_tokens, num_tokens, width // num_heads, False),
        Product(num_tokens, width, width),
    )
    mlp = (
        Product(num_tokens, width, 4 * width),
        Product(num_tokens, 4 * width, width),
    )
    head: tuple[Product, ...] = (Product(1, width, width), Product(1, width, 2))
    if num_scored:
        head = (Product(num_scored, width, num_words),)
    embedding = CountedLayer(
        "embedding",
        (),
        other_floats=4 * tokens_by_width,
        kept_floats=tokens_by_width,
        received_floats=num_tokens,
        num_weights=(num_words + num_tokens) * width,
    )
    blocks = (
        layer
        for block in range(num_blocks)
        for layer in (
            CountedLayer(
                f"block{block}.attention",
                attention,
                other_floats=8 * tokens_by_width + 6 * scores,
                kept_floats=(13 * tokens_by_width + 5 * scores) // 2,
                received_floats=tokens_by_width,
                num_weights=6 * width,
            ),
            CountedLayer(
                f"block{block}.mlp",
                mlp,
                other_floats=16 * tokens_by_width,
                kept_floats=21 * tokens_by_width // 2,
                received_floats=tokens_by_width,
                num_weights=7 * width,
            ),
        )
    )
    last = CountedLayer(
        "head",
        head,
        other_floats=sum(p.rows * p.columns * 4 for p in head),
        kept_floats=sum(p.rows * (p.inner + p.columns) for p in head),
        received_floats=tokens_by_width,
    )
    return (embedding, *blocks, last)


def dense(num_layers: int, width: int) -> tuple[CountedLayer, ...]:
    """Fully connected layers of one width, each with a ReLU.

    Args:
        num_layers: alike.
        width: the width of each layer.
    """
    return tuple(
        CountedLayer(
            f"dense{i}",
            (Product(1, width, width),),
            other_floats=4 * width,
            kept_floats=2 * width,
            received_floats=width,
            num_weights=width,
        )
        for i in range(num_layers)
    )


def recurrent(num_layers: int, width: int, num_tokens: int) -> tuple[CountedLayer, ...]:
    """LSTM layers of one width: inputs at once, states one after another.

    Args:
        num_layers: alike.
        width: the width of inputs and states.
        num_tokens: the tokens of a sample.
    """
    return tuple(
        CountedLayer(
            f"lstm{i}",
            (
                Product(num_tokens, width, 4 * width),
                Product(1, width, 4 * width, num_times=num_tokens),
            ),
            other_floats=16 * num_tokens * width,
            kept_floats=8 * num_tokens * width,
            received_floats=num_tokens * width,
            num_weights=8 * width,
        )
        for i in range(num_layers)
    )


# Devlin et al., arXiv:1810.04805, for BERT; Brown et al., arXiv:2005.14165, table 2.1,
# for GPT-3 Medium. BERT-36 and BERT-48 are BERT-24 with more blocks.
_BERT_WORDS: Final = 30_522
_GPT_WORDS: Final = 50_257


def bert(num_blocks: int, *, num_scored: int) -> tuple[CountedLayer, ...]:
    """BERT with sentences of 128 tokens; base up to 12 blocks, large beyond.

    Args:
        num_blocks: 12, 24, 36 or 48.
        num_scored: masked words, in pre-training; 0 in fine-tuning.
    """
    width, num_heads = (768, 12) if num_blocks <= 12 else (1024, 16)
    return transformer(
        num_blocks, width, num_heads, 128, num_words=_BERT_WORDS, num_scored=num_scored
    )


def deep_bert(num_blocks: int) -> tuple[CountedLayer, ...]:
    """BERT-base with more blocks, for two classes; as WPipe's throughput has it.

    Args:
        num_blocks: the number of blocks of BERT-base's width.
    """
    return transformer(num_blocks, 768, 12, 128, num_words=_BERT_WORDS, num_scored=0)


def gpt3_medium(num_tokens: int) -> tuple[CountedLayer, ...]:
    """GPT-3 Medium: 24 blocks of width 1024, every token scored."""
    return transformer(
        24, 1024, 16, num_tokens, num_words=_GPT_WORDS, num_scored=num_tokens
    )
