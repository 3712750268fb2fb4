"""Runs a stage's forward a second time, exactly as it ran the first time.

    F    runs, and what autograd would save is discarded at once;
         kept are the input, the random state, and copies of the buffers it changes
    B    runs the forward again from these, then backward

The first run records its graph like any other (hocket.model.stages), so that it
computes the same numbers.

The buffers (a BatchNorm's statistics) are changed by the first run only: the second one
finds the copies in their place, and changes those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hocket.model.stages.parameter_paths import Home
from hocket.model.stages.stage import StageModule
from hocket.run.data.batch import Microbatch
from hocket.run.stage.seed import preserve_generators, random_state, set_random_state


class ForwardInputs(NamedTuple):
    """The arguments of a forward.

    Args:
        microbatch: the microbatch's inputs and targets.
        received: the values from the stage before, detached.
        weight: the microbatch's share of the step, by samples.
    """

    microbatch: Microbatch
    received: tuple[Tensor, ...]
    weight: float


@dataclass(frozen=True, slots=True)
class Replay:
    """The state from which a forward runs the same again.

    Args:
        inputs: its arguments.
        buffers: copies of the buffers that it changes, from before its first run.
        random: the generator's state from before its first run.
    """

    inputs: ForwardInputs
    buffers: tuple[Tensor, ...]
    random: Tensor


class Replayer:
    """Saves and restores what a stage's forward depends on.

    Args:
        module: the stage.
        device: the stage's device.
    """

    def __init__(self, module: StageModule, device: torch.device) -> None:
        self._device = device
        self._homes = changing_buffers(module)

    def keep(self, inputs: ForwardInputs) -> Replay:
        """Save the state; called when the generator is seeded, before the first run."""
        copies: dict[int, Tensor] = {}  # one name of a buffer that has several
        for home, key in self._homes:
            buffer = home[key]
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.detach().clone()
        buffers = tuple(copies[id(home[key])] for home, key in self._homes)
        return Replay(inputs, buffers, random_state(self._device))

    @contextmanager
    def restored(self, replay: Replay) -> Iterator[None]:
        """Restore the state for the second run; afterwards, undo that."""
        now = [home[key] for home, key in self._homes]
        with preserve_generators(self._device):
            set_random_state(self._device, replay.random)
            self._put(replay.buffers)
            try:
                yield
            finally:
                self._put(now)

    def _put(self, buffers: Sequence[Tensor]) -> None:
        for (home, key), buffer in zip(self._homes, buffers, strict=True):
            home[key] = buffer


def changing_buffers(module: StageModule) -> tuple[Home, ...]:
    """Return where a stage keeps the buffers that its forward changes in training."""
    named = module.named_buffers(remove_duplicate=False)
    changing = {id(x) for name, x in named if name in module.changed_buffers}
    return tuple(
        (child._buffers, key)
        for child in module.modules()
        for key, buffer in child._buffers.items()
        if id(buffer) in changing
    )
