"""The bytes of tensors that a worker holds while it trains a step, from the allocator.

    a step │ found at rest │ a step: the most that it adds

At rest, between two steps, every tensor is a Python object: all are looked up, and each
block of memory counts once. What a step adds, the allocator reports
(`hocket.model.profile.allocations`), if it has given out itself what the step gives
back: old weights. So a step comes before.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hocket
from hocket.model.profile.allocations import allocations


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What one worker holds.

    Args:
        rest_bytes: between two steps, without what follows.
        added_bytes: the most at once in a step, beyond all that is there at rest.
        elsewhere_bytes: weights of other workers' stages, where the user's model is
            still there and has them.
    """

    rest_bytes: int
    added_bytes: int
    elsewhere_bytes: int

    @property
    def peak_bytes(self) -> int:
        """What the worker's part of the plan comes to."""
        return self.rest_bytes + self.added_bytes


def step_bytes(
    pipeline: hocket.Pipeline,
    model: nn.Module | None,
    batch: Any,
    users: Iterable[Tensor],
) -> StepBytes:
    """Train one step, and another to see what it takes. Every worker must call this.

    Args:
        pipeline: that has trained a step or two, so that optimizers have their state.
        model: the pipeline's; None where only the pipeline referred to it.
        batch: to train on.
        users: tensors of the user's own, which do not count.
    """
    return play_bytes(pipeline, model, lambda: pipeline.step(batch), users)


def play_bytes(
    pipeline: hocket.Pipeline,
    model: nn.Module | None,
    play: Callable[[], object],
    users: Iterable[Tensor],
) -> StepBytes:
    """Train whatever one wants twice, and see what it takes. Every worker must call.

    Args:
        pipeline: as for `step_bytes`.
        model: as for `step_bytes`.
        play: trains some steps.
        users: as for `step_bytes`.
    """
    with allocations(torch.device("cpu")) as log:
        play()
        own = _own_tensors(pipeline)
        uncut = () if model is None else (*model.parameters(), *model.buffers())
        others = {_address(x): x for x in uncut}
        elsewhere = sum(_size(x) for at, x in others.items() if at not in own)
        apart = {*others, *(_address(x) for x in users)} - own
        rest = sum(_size(x) for at, x in alive().items() if at not in apart)
        with log.span():
            play()
    return StepBytes(rest, log.peaks[0], elsewhere)


def distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Of all memory that some tensors lie in."""
    return sum({_address(x): _size(x) for x in tensors}.values())


def _own_tensors(pipeline: hocket.Pipeline) -> set[int]:
    runners = pipeline._executor.runners.values()
    modules = [runner.module for runner in runners]
    return {_address(x) for m in modules for x in (*m.parameters(), *m.buffers())}


def alive() -> dict[int, Tensor]:
    """A tensor of each block that the allocator gave out, by its address."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's deprecated names look at themselves
        tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    found = {_address(x): x for x in tensors if x.device.type == "cpu" and _address(x)}
    return {at: x for at, x in found.items() if x.untyped_storage().resizable()}


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
