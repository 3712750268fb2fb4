"""Bring together what the workers hold: the model's state, the step's timeline."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.plan.simulate import observed
from hocket.plan.timeline import Origin, Timeline
from hocket.run.build import Plan
from hocket.run.crew import Crew
from hocket.run.layout import Layout
from hocket.run.worker import Record
from hocket.run.world import World


def gather_state(
    model: nn.Module, crew: Crew, plan: Plan, layout: Layout
) -> dict[str, Tensor]:
    """The uncut model's state, collected from the first replica's stages.

    Every worker must call this, and gets the whole state. Copies, on the CPU.

    Args:
        model: the uncut model, for names, shapes and order.
        crew: this worker's stages.
        plan: says which device holds which stage.
        layout: of the ranks.
    """
    held: dict[str, Tensor] = {}
    for runner in crew.runners.values():
        held.update(runner.module.state_dict())
    owners = _owners(plan, layout)
    state = {}
    for name, tensor in model.state_dict().items():
        source = owners[name]
        own = held[name].detach() if name in held else torch.empty_like(tensor)
        value = own.clone(memory_format=torch.contiguous_format)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(value, source)
        state[name] = value.cpu()
    return state


def gather_timeline(
    plan: Plan, record: Record, world: World, layout: Layout
) -> Timeline:
    """The first replica's step as one timeline, on one clock, from second 0.

    Every worker must call this, and gets the timeline.
    """
    offset = world.clock_offset_s
    own = {
        "device": layout.device,
        "replica": layout.replica,
        "start_s": (record.start_s + offset).tolist(),
        "end_s": (record.end_s + offset).tolist(),
    }
    parts = [part for part in world.gather_json(own) if part["replica"] == 0]
    parts.sort(key=lambda part: int(part["device"]))
    begin = min(min(part["start_s"]) for part in parts if part["start_s"])
    starts = tuple(np.array(part["start_s"]) - begin for part in parts)
    ends = tuple(np.array(part["end_s"]) - begin for part in parts)
    return observed(plan.schedule, plan.costs, starts, ends, Origin.MEASURED)


def _owners(plan: Plan, layout: Layout) -> dict[str, int]:
    """The rank of the first replica that holds each name."""
    owners: dict[str, int] = {}
    for stage, names in enumerate(plan.state_names):
        device = plan.schedule.program.stages[stage].device
        for name in names:
            owners.setdefault(name, device)
    return owners
