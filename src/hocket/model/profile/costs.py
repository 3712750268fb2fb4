"""Turns measured layers into the simulator's costs of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from hocket.core.costs import Costs, Link
from hocket.model.profile.profile import Profile
from hocket.model.stages.stage import StageModule
from hocket.planner.stages import add_layers


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """The cost of one stage's optimizer step.

    Args:
        seconds: the median seconds.
        state_bytes: the bytes of the optimizer's state after a step, and of averages.
        work_bytes: the most allocated at once during the step, beyond that.
    """

    seconds: float
    state_bytes: int
    work_bytes: int = 0


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
    layers = [layer.cost() for layer in profile.layers]
    edges = (0, *boundaries, len(layers))
    stages = []
    for i, module in enumerate(modules):
        own = layers[edges[i] : edges[i + 1]]
        following = None if i + 1 == len(modules) else layers[edges[i + 1]]
        trained = [p for p in module.parameters() if p.requires_grad]
        stages.append(
            replace(
                add_layers(own, following),
                update_s=updates[i].seconds,
                weight_bytes=_num_bytes([*module.parameters(), *module.buffers()]),
                gradient_bytes=_num_bytes(trained),
                optimizer_bytes=updates[i].state_bytes,
                update_work_bytes=updates[i].work_bytes,
                replay_bytes=_replay_bytes(module),
                holds_input=own[0].held_input_bytes > 0,
            )
        )
    return Costs(tuple(stages), link=link, handling=handling)


def _replay_bytes(module: StageModule) -> int:
    """Return the bytes of copies of buffers that a forward changes."""
    buffers = module.named_buffers()
    return _num_bytes([x for name, x in buffers if name in module.changed_buffers])


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
