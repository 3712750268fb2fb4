"""Llama 3.1, counted by hand as torchtitan trained it at the end of 2024.

Weights are shards in float32 that are gathered in bfloat16; products are in bfloat16.
A block keeps, by torchtitan's selective recomputation, the outputs of its attention and
of every second matrix product, and makes all else once more in its backward:

    kept      q    v    attention    w1    w2       of q k v o w1 w3 w2
    again       k            o         w3           and norms, rotation, gate

Elementwise operators are counted by the numbers that they read and write, op by op as
eager torch starts them, and as torch.compile fuses them: then each value is read once
and written once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from hocket.planner.work import Affine, LayerOps, Ops, Weights

HALF: Final = 2  # bytes of a number in bfloat16
SINGLE: Final = 4
_NOTHING: Final = Affine(0.0, 0.0)
_ADAM: Final = 2  # numbers of state per weight

Op: TypeAlias = tuple[float, float, float]  # per sample: FLOPs, bytes, bytes held


@dataclass(frozen=True, slots=True)
class Llama:
    """The sizes of a model, and how it is trained.

    Args:
        width: of the hidden states.
        num_blocks: the transformer's.
        mlp_width: inside the MLP.
        num_heads: of queries.
        num_kv_heads: of keys and values.
        num_words: the vocabulary; embedding and head are not tied.
        num_tokens: of a sample.
        is_compiled: whether torch.compile fuses the blocks' elementwise operators.
        is_selective: whether blocks keep what is said above; else they keep nothing but
            their inputs, and make all once more.
        num_parts: by how many devices a block's work and weights are divided (tensor
            parallelism, whose messages are not counted).
    """

    width: int
    num_blocks: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    num_words: int = 128256
    num_tokens: int = 8192
    is_compiled: bool = False
    is_selective: bool = True
    num_parts: int = 1

    @property
    def kv_width(self) -> int:
        """The width of keys, and of values."""
        return self.width * self.num_kv_heads // self.num_heads

    @property
    def num_weights(self) -> int:
        """The weights of the whole model."""
        block = sum(a * b for a, b in self.products.values()) + 2 * self.width
        return (
            self.num_blocks * block
            + 2 * self.num_words * self.width
            + self.width  # the last norm
        )

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """A block's matrix products: the inputs and outputs of each."""
        d, f, kv = self.width, self.mlp_width, self.kv_width
        return {
            "q": (d, d),
            "k": (d, kv),
            "v": (d, kv),
            "o": (d, d),
            "w1": (d, f),
            "w3": (d, f),
            "w2": (f, d),
        }


LLAMA_8B: Final = Llama(4096, 32, 14336, 32, 8)
LLAMA_405B: Final = Llama(16384, 126, 53248, 128, 8)


def layers(model: Llama) -> tuple[LayerOps, ...]:
    """Return the embedding, the blocks and the head with its loss."""
    blocks = (_block(model, f"block{i}") for i in range(model.num_blocks))
    return (_embedding(model), *blocks, _head(model))


def _embedding(model: Llama) -> LayerOps:
    moved = 2 * HALF * model.width * model.num_tokens
    back = _ops([(0.0, moved, 0.0)], model)
    return LayerOps(
        "embedding",
        forward=back,
        input_grad=_ops([], model),
        backward=back,
        activation_bytes=_NOTHING,
        kept_input_bytes=_NOTHING,
        received_bytes=Affine(0.0, 8.0 * model.num_tokens),
        received_grad_bytes=_NOTHING,
        weights=_weights("embedding", model.num_words * model.width, model),
    )


def _block(model: Llama, name: str) -> LayerOps:
    d, f, kv, tokens = model.width, model.mlp_width, model.kv_width, model.num_tokens
    forward = [_product(*sizes, tokens) for sizes in model.products.values()]
    attention_flops = 2.0 * d * tokens * tokens  # causal: half of 4 d T T
    forward.append((attention_flops, HALF * 4.0 * d * tokens, 0.0))
    elementwise = [
        (0.0, count * tokens, 0.0) for count in _elementwise_bytes(model, d, f, kv)
    ]
    # The gradients of both factors; attention's backward has five products, not two.
    to_inputs = [
        *(_product(*sizes, tokens) for sizes in model.products.values()),
        (2.5 * attention_flops, HALF * 8.0 * d * tokens, 0.0),
        *((flops, 2 * moved, held) for flops, moved, held in elementwise),
    ]
    to_weights = [_product(*sizes, tokens) for sizes in model.products.values()]
    recomputed = [*forward, *elementwise]
    if model.is_selective:
        again = (model.products[name] for name in ("k", "o", "w3"))
        recomputed = [*(_product(*sizes, tokens) for sizes in again), *elementwise]
    # What is made once more is there at once: norms, q and k rotated, k and v for all
    # heads, o, w3, the gate and its product; and as much of gradients of the MLP.
    made = HALF * (6 * d + 4 * f) * tokens
    # Eager torch also keeps w2, which no backward reads; a compiled block does not.
    outputs = kv + f + (2 if model.is_compiled else 3) * d
    kept = (HALF * outputs + SINGLE * model.num_heads) * tokens * model.is_selective
    input_bytes = Affine(0.0, HALF * d * tokens)
    return LayerOps(
        name,
        _ops([*forward, *elementwise], model),
        _ops([*recomputed, *to_inputs], model),
        _ops([*recomputed, *to_inputs, *to_weights, (0.0, 0.0, made)], model),
        activation_bytes=Affine(0.0, kept / model.num_parts),
        kept_input_bytes=input_bytes,
        received_bytes=input_bytes,
        received_grad_bytes=input_bytes,
        weights=_weights(
            name, sum(a * b for a, b in model.products.values()) + 2 * d, model
        ),
    )


def _elementwise_bytes(model: Llama, d: int, f: int, kv: int) -> list[float]:
    """Return the bytes per token of each group of elementwise operators."""
    wide = 2 * (d / 2 + kv) if model.num_kv_heads < model.num_heads else 0.0
    if model.is_compiled:
        return [
            2 * 8.0 * d,  # norm and residual: two read, two written
            4.0 * (d + kv),  # rotation
            HALF * (2 * kv + 2 * d),  # k and v for all heads
            4.0 * d,  # heads side by side
            6.0 * f,  # gate and product
        ]
    return [
        # A norm in float32: cast, square, mean, scale, cast back, weight.
        2 * (6 + 8 + 4 + 8 + 6 + 4.0) * d,
        20.0 * (d + kv),  # cast, rotate as complex numbers, cast back
        HALF * (2 * kv + 2 * d) if wide else 0.0,
        4.0 * d,
        2 * 6.0 * d,  # residuals
        (4 + 6.0) * f,
    ]


def _head(model: Llama) -> LayerOps:
    """The last norm, the scores of all words, and the loss in float32, not compiled."""
    d, words, tokens = model.width, model.num_words, model.num_tokens
    scores = _product(d, words, tokens)
    floats = words * tokens
    # The scores are cast; logarithms of probabilities are kept.
    forward = [scores, (0.0, 6.0 * floats, 0.0), (0.0, 8.0 * floats, 0.0)]
    # Gradients of the loss and of the scores, both in float32, then cast.
    back = [
        (0.0, 4.0 * floats, 0.0),
        (0.0, 12.0 * floats, 2.0 * SINGLE * floats),
        (0.0, 6.0 * floats, 0.0),
        scores,
    ]
    input_bytes = Affine(0.0, HALF * d * tokens)
    return LayerOps(
        "head",
        _ops(forward, model),
        _ops(back, model),
        _ops([*back, scores], model),
        activation_bytes=Affine(0.0, SINGLE * floats / model.num_parts),
        kept_input_bytes=input_bytes,
        received_bytes=input_bytes,
        received_grad_bytes=input_bytes,
        weights=_weights("head", words * d + d, model),
    )


def _product(inner: int, columns: int, tokens: int) -> Op:
    moved = HALF * (tokens * (inner + columns) + inner * columns)
    return 2.0 * inner * columns * tokens, moved, 0.0


def _ops(ops: Iterable[Op], model: Llama) -> Ops:
    rows: Sequence[Op] = [*ops]
    columns = [[x / model.num_parts for x in row] for row in zip(*rows, strict=True)]
    flops, moved, held = columns or ([], [], [])
    nothing = [0.0] * len(rows)
    return Ops(*(np.array([nothing, each]) for each in (flops, moved, held)))


def _weights(name: str, number: int, model: Llama) -> tuple[Weights, ...]:
    own = -(-number // model.num_parts)
    states = _ADAM * SINGLE * own
    return (Weights(name, SINGLE * own, SINGLE * own, states, HALF * own),)
