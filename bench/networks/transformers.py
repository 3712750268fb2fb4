"""Transformers, dense and recurrent networks of published experiments, counted by hand.

Attention and MLP are layers of their own, so that a cut may go between them.
"""

from __future__ import annotations

from typing import Final

from hocket.planner.published.catalogue import CountedLayer, Product


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
