"""Random numbers that depend neither on the schedule nor on the cut.

Before a layer that draws random numbers (dropout), the generator is seeded from the
run's seed, the step, the net, the microbatch and the layer's number in the uncut model.
The layer draws the same numbers in any stage, on any worker, and whatever ran before.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from hocket import cuda
from hocket.model.capture.lost_in_graph import preserve_numbers
from hocket.model.stages.stage import StageModule

_MASK = (1 << 64) - 1


def _mixed(state: int, number: int) -> int:
    """Mix one more number into a state of 64 bits (splitmix64's finisher)."""
    state = (state + 0x9E3779B97F4A7C15 + number) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def step_seed(seed: int, step: int) -> int:
    """Return the only seed of a captured step, which has one microbatch.

    Args:
        seed: the run's seed.
        step: the training step, from 0.
    """
    return _mixed(seed & _MASK, step) >> 1  # generators take signed 64-bit numbers


@contextmanager
def layers_seeded(
    module: StageModule,
    device: torch.device,
    seed: int,
    step: int,
    net: str,
    microbatch: int,
) -> Iterator[None]:
    """Seed each layer that draws, while a stage's training forwards run.

    Args:
        module: the stage's module.
        device: the device that it runs on.
        seed: the run's seed.
        step: the training step, from 0.
        net: the net's name.
        microbatch: the microbatch's number in the step, over all replicas.
    """
    state = seed & _MASK
    for number in (step, zlib.crc32(net.encode()), microbatch):
        state = _mixed(state, number)
    seeds = module.layer_seeds

    def seed_layer(layer: int) -> None:
        value = _mixed(state, layer) >> 1  # generators take signed 64-bit numbers
        seed_generators(device, value)
        if seeds.draws_numbers:
            random.seed(value)
            np.random.seed(value % (1 << 32))

    seeds.seed = seed_layer
    try:
        with preserve_numbers() if seeds.draws_numbers else nullcontext():
            yield
    finally:
        seeds.seed = None


def seed_generators(device: torch.device, value: int) -> None:
    """Seed the generator of a device."""
    _generator(device).manual_seed(value)


def preserve_generators(device: torch.device) -> AbstractContextManager[None]:
    """Restore the user's generators when the block ends.

    Without this, each worker's global generator would end a step in another state, and
    shuffling loaders would yield different batches on each worker.
    """
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def random_state(device: torch.device) -> Tensor:
    """Return the state of a device's generator."""
    return _generator(device).get_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Restore the state of a device's generator."""
    _generator(device).set_state(state)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return cuda.generator(device)
    return torch.default_generator
