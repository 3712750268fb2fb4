"""Sends learning rate and schedule to workers whose layers are all frozen.

[a b] │ [c] d │ e f       frozen: a b c
        rate    rate ─▶   the last device always trains, and broadcasts
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hocket.run.checkpoint.format.values import decode, encode
from hocket.run.cluster.world import World
from hocket.run.engine.executor import PlayedLayout
from hocket.run.weights.migration import CommonState


def learning_rate(now: PlayedLayout, world: World) -> float:
    """Return the learning rate of the last update; every worker must call this."""
    updaters = now.executor.updaters.values()
    own = next((x.rates()[0] for x in updaters if x.rates()), 0.0)
    return own if _all_train(now) else float(_of_last(now, world, own))


def common_state(now: PlayedLayout, world: World) -> CommonState | None:
    """Return the optimizer's options and the schedule; every worker must call this.

    Raises:
        CheckpointError: an optimizer or a schedule keeps functions in its options.
    """
    own = CommonState.of(now.executor.updaters.values())
    if _all_train(now):
        return own
    tensors: dict[str, Tensor] = {}
    known = None if own is None else [[*own.groups], own.schedule]
    state = encode(known, "the learning-rate schedule", tensors)
    values = {name: [str(x.dtype), x.tolist()] for name, x in tensors.items()}
    state, values = _of_last(now, world, [state, values])
    if own is not None:
        return own

    def tensor(name: str, on_host: bool) -> Tensor:
        dtype, value = values[name]
        kind = getattr(torch, dtype.removeprefix("torch."))
        found = torch.tensor(value, dtype=kind)
        return found if on_host else found.to(world.device)

    return CommonState(*decode(state, tensor))


def _all_train(now: PlayedLayout) -> bool:
    program = now.plan.schedule.program
    training = {stage.device for stage in program.stages if stage.trainable}
    return len(training) == program.num_devices


def _of_last(now: PlayedLayout, world: World, value: Any) -> Any:
    last = now.layout.num_devices - 1  # of the first replica
    return world.broadcast_json(value, last, "the state of updates")
