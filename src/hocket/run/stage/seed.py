"""Random numbers that do not depend on the schedule.

Before a forward that draws random numbers (dropout), the generator is seeded from the
run's seed, the step, the stage and the microbatch. Whoever runs this forward, and
whatever ran before it, draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def seed_of(seed: int, step: int, stage: int, microbatch: int) -> int:
    """Mix four numbers into one (splitmix64's finisher, applied to each in turn)."""
    state = seed & _MASK
    for number in (step, stage, microbatch):
        state = (state + 0x9E3779B97F4A7C15 + number) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1  # generators take signed 64-bit numbers


def seed_generators(device: torch.device, value: int) -> None:
    """Seed the generator that work on `device` draws from."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value)
    else:
        torch.default_generator.manual_seed(value)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Leave the user's random numbers as they were, whatever is seeded inside.

    Without this, each worker's global generator would end a step in another state, and
    shuffling loaders would give each worker other batches.
    """
    cpu = torch.default_generator.get_state()
    own = random_state(device)
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu)
        set_random_state(device, own)


def random_state(device: torch.device) -> Tensor:
    """The state of the generator that work on `device` draws from."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.default_generator.get_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Put it back."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.default_generator.set_state(state)
