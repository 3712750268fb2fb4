"""Turns measured layers into the simulator's costs of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from hocket.core.costs import StageCost
from hocket.model.profile.profile import Profile
from hocket.model.stages.stage import StageModule
from hocket.model.trace.local import local
from hocket.model.trace.state import gradient_bytes
from hocket.planner.stages import added_up


def stage_costs(
    profile: Profile, boundaries: Sequence[int], modules: Sequence[StageModule]
) -> tuple[StageCost, ...]:
    """Add up layers into stages, whose updates cost nothing yet.

    Args:
        profile: the layers' profile.
        boundaries: the layers at which stages 1, 2, ... begin.
        modules: the stages, for the bytes of their weights.
    """
    stages = []
    sums = added_up(profile.layers, boundaries)
    for module, (own, cost) in zip(modules, sums, strict=True):
        stages.append(
            replace(
                cost,
                weight_bytes=_num_bytes([*module.parameters(), *module.buffers()]),
                gradient_bytes=sum(map(gradient_bytes, module.parameters())),
                replay_bytes=_replay_bytes(module),
                holds_input=own[0].held.held_input_bytes > 0,
            )
        )
    return tuple(stages)


def _replay_bytes(module: StageModule) -> int:
    """Return the bytes of copies of buffers that a forward changes."""
    buffers = module.named_buffers()
    return _num_bytes([x for name, x in buffers if name not in module.fixed_buffers])


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)
