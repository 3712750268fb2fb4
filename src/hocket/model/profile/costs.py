"""Turns measured layers into the simulator's costs of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hocket.core.costs import Costs, Link, StageCost
from hocket.model.profile.profile import Profile
from hocket.model.stages.stage import StageModule
from hocket.planner.layer_bytes import (
    activation_bytes,
    backward_work_bytes,
    forward_work_bytes,
    input_grad_work_bytes,
    weight_grad_held_bytes,
    weight_grad_work_bytes,
)


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """The cost of one stage's optimizer step.

    Args:
        seconds: the median seconds.
        state_bytes: the bytes of the optimizer's state after a step, of averages, and
            of what a correction of stale gradients keeps.
        work_bytes: the most allocated at once during the step, beyond that.
        guess_bytes: the bytes of predicted weights, which forwards read in place of the
            newest.
    """

    seconds: float
    state_bytes: int
    work_bytes: int = 0
    guess_bytes: int = 0


def stage_costs(
    profile: Profile,
    boundaries: Sequence[int],
    modules: Sequence[StageModule],
    *,
    link: Link,
    handling: Link,
    updates: Sequence[UpdateCost],
) -> Costs:
    """Add up layers into stages.

    Args:
        profile: the layers' profile.
        boundaries: the layers at which stages 1, 2, ... begin.
        modules: the stages, for the bytes of their weights.
        link: the link between any two devices.
        handling: the time that a lane spends on a message.
        updates: the update cost of each stage.
    """
    edges = (0, *boundaries, len(profile.layers))
    stages = []
    for i, module in enumerate(modules):
        layers = profile.layers[edges[i] : edges[i + 1]]
        last = i + 1 == len(modules)
        following = None if last else profile.layers[edges[i + 1]]
        weights = _num_bytes([*module.parameters(), *module.buffers()])
        trained = _num_bytes([p for p in module.parameters() if p.requires_grad])
        stages.append(
            StageCost(
                forward_s=sum(layer.forward_s for layer in layers),
                input_grad_s=sum(layer.input_grad_s for layer in layers),
                weight_grad_s=sum(layer.weight_grad_s for layer in layers),
                update_s=updates[i].seconds,
                output_bytes=0 if following is None else following.received_bytes,
                input_grad_bytes=layers[0].received_grad_bytes,
                activation_bytes=activation_bytes(layers),
                weight_grad_held_bytes=weight_grad_held_bytes(layers),
                weight_bytes=weights,
                gradient_bytes=trained,
                optimizer_bytes=updates[i].state_bytes,
                forward_work_bytes=forward_work_bytes(layers),
                backward_work_bytes=backward_work_bytes(layers),
                input_grad_work_bytes=input_grad_work_bytes(layers),
                weight_grad_work_bytes=weight_grad_work_bytes(layers),
                update_work_bytes=updates[i].work_bytes,
                guess_bytes=updates[i].guess_bytes,
                replay_bytes=_replay_bytes(module),
                holds_input=layers[0].held_input_bytes > 0,
                split_s=max(0.0, sum(layer.split_s for layer in layers)),
            )
        )
    return Costs(tuple(stages), link=link, handling=handling)


def _replay_bytes(module: StageModule) -> int:
    """Return the bytes of copies of buffers that a forward changes."""
    buffers = module.named_buffers()
    return _num_bytes([x for name, x in buffers if name in module.changed_buffers])


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
