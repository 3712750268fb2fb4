"""JAX's step of two of `ooo_single`'s networks, to be read beside its numbers.

    python -m bench.gpu.ooo_single_jax [--size full|small] [--output FILE]

Needs jax with CUDA (`pip install "jax[cuda12]"`), which nothing else here does. XLA may
run what does not depend on each other at the same time, in its command buffers; its
flags (`XLA_FLAGS`) are written into the result. The networks have the sizes of
`bench/gpu/ooo_single.py`, bfloat16 products, float32 weights, and SGD with momentum.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from bench.measure import environment, spread, write_result

RESULTS: Final = Path(__file__).parent / "results"
NUM_ROUNDS: Final = 15
STEPS_IN_TURN: Final = 10
RATE: Final = 1e-3
MOMENTUM: Final = 0.9
NUM_TOKENS: Final = 1000
Weights = dict[str, Any]


def main() -> None:
    """Measure each network, and write what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--output", type=Path, default=RESULTS / "ooo_single_jax.json")
    arguments = parser.parse_args()
    try:
        jax: Any = import_module("jax")
    except ImportError:
        raise SystemExit(
            'jax is not installed, and nothing was measured: pip install "jax[cuda12]" '
            "into an environment of its own"
        ) from None
    rows = {
        name: measured(jax, *make(jax, is_small=arguments.size == "small"))
        for name, make in {"transformer": transformer, "lstm": lstm}.items()
    }
    facts = {
        "jax": jax.__version__,
        "devices": [str(device) for device in jax.devices()],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    write_result(arguments.output, {"environment": environment() | facts, **rows})


Forward = Callable[[Weights, Any], Any]


def measured(
    jax: Any, forward: Forward, weights: Weights, tokens: Any
) -> dict[str, Any]:
    """Return the seconds of a step, by its loss, gradients and update in one jit."""
    jnp = jax.numpy
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def loss(own: Weights) -> Any:
        chances = jax.nn.log_softmax(forward(own, inputs).astype(jnp.float32))
        return -jnp.take_along_axis(chances, targets[..., None], -1).mean()

    def step(own: Weights, speed: Weights) -> tuple[Weights, Weights, Any]:
        value, grads = jax.value_and_grad(loss)(own)
        add, move = (lambda v, g: MOMENTUM * v + g), (lambda w, v: w - RATE * v)
        speed = jax.tree.map(add, speed, grads)
        return jax.tree.map(move, own, speed), speed, value

    play = jax.jit(step, donate_argnums=(0, 1))
    speed = jax.tree.map(jnp.zeros_like, weights)
    begin_s = perf_counter()
    weights, speed, first = play(weights, speed)
    first.block_until_ready()
    compile_s, seconds = perf_counter() - begin_s, []
    for _ in range(NUM_ROUNDS):
        begin_s = perf_counter()
        for _ in range(STEPS_IN_TURN):
            weights, speed, last = play(weights, speed)
        last.block_until_ready()
        seconds.append((perf_counter() - begin_s) / STEPS_IN_TURN)
    falls = bool(last < first)
    return {"holds": falls, "step": spread(seconds), "compile_s": round(compile_s, 2)}


def transformer(jax: Any, *, is_small: bool) -> tuple[Forward, Weights, Any]:
    """Six layers of width 256, for 8 sequences of 128 tokens."""
    draw, width, (num, length) = _drawer(jax), 256, (2, 8) if is_small else (8, 128)
    jnp = jax.numpy
    blocks = [
        {
            "qkv": draw(width, 3 * width),
            "out": draw(width, width),
            "up": draw(width, 4 * width),
            "down": draw(4 * width, width),
        }
        for _ in range(6)
    ]
    weights = {
        "in": draw(NUM_TOKENS, width),
        "blocks": blocks,
        "out": draw(width, NUM_TOKENS),
    }

    def norm(x: Any) -> Any:
        x = x.astype(jnp.float32)
        return (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)

    def block(own: Mapping[str, Any], x: Any) -> Any:
        parts = jnp.split(_times(jax, norm(x), own["qkv"]), 3, -1)
        heads = [part.reshape(*part.shape[:2], 4, -1) for part in parts]
        mixed = jax.nn.dot_product_attention(*heads, is_causal=True)
        x = x + _times(jax, mixed.reshape(x.shape), own["out"])
        return x + _times(
            jax, jax.nn.gelu(_times(jax, norm(x), own["up"])), own["down"]
        )

    def forward(own: Weights, tokens: Any) -> Any:
        x = own["in"][tokens].astype(jnp.bfloat16)
        for each in own["blocks"]:
            x = block(each, x)
        return _times(jax, x, own["out"])

    return forward, weights, _tokens(jax, num, length)


def lstm(jax: Any, *, is_small: bool) -> tuple[Forward, Weights, Any]:
    """Two layers of width 512, for 32 sequences of 128 tokens."""
    draw, width, (num, length) = _drawer(jax), 512, (2, 8) if is_small else (32, 128)
    jnp = jax.numpy
    cells = [
        {"x": draw(width, 4 * width), "h": draw(width, 4 * width)} for _ in range(2)
    ]
    weights = {
        "in": draw(NUM_TOKENS, width),
        "cells": cells,
        "out": draw(width, NUM_TOKENS),
    }

    def layer(own: Mapping[str, Any], x: Any) -> Any:
        def cell(state: tuple[Any, Any], gates: Any) -> tuple[tuple[Any, Any], Any]:
            h, c = state
            i, f, g, o = jnp.split(gates + _times(jax, h, own["h"]), 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((x.shape[0], width), x.dtype)
        gates = _times(jax, x, own["x"]).swapaxes(0, 1)
        return jax.lax.scan(cell, (zero, zero), gates)[1].swapaxes(0, 1)

    def forward(own: Weights, tokens: Any) -> Any:
        x = own["in"][tokens].astype(jnp.bfloat16)
        for each in own["cells"]:
            x = layer(each, x)
        return _times(jax, x, own["out"])

    return forward, weights, _tokens(jax, num, length)


def _times(jax: Any, x: Any, weight: Any) -> Any:
    """Return a product in bfloat16."""
    return x.astype(jax.numpy.bfloat16) @ weight.astype(jax.numpy.bfloat16)


def _drawer(jax: Any) -> Callable[[int, int], Any]:
    """Return what draws a weight, each from another key."""
    keys = iter(jax.random.split(jax.random.key(0), 64))
    return lambda rows, columns: 0.02 * jax.random.normal(next(keys), (rows, columns))


def _tokens(jax: Any, num: int, length: int) -> Any:
    return jax.random.randint(jax.random.key(1), (num, length + 1), 0, NUM_TOKENS)


if __name__ == "__main__":
    main()
