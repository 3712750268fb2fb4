"""Bring together what the workers hold: the model's state."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.model.stages.outline import Outline
from hocket.run.cluster.layout import Layout
from hocket.run.engine.executor import Executor
from hocket.run.engine.plan import Plan


def gather_state(
    outline: Outline,
    executor: Executor,
    plan: Plan,
    layout: Layout,
    device: torch.device,
) -> dict[str, Tensor]:
    """The uncut model's state, collected from the first replica's stages.

    Every worker must call this, and gets the whole state. Copies, on the CPU; of a tied
    weight one, under each of its names.

    Args:
        outline: of the uncut model, for names, shapes and order.
        executor: this worker's stages.
        plan: says which device holds which stage.
        layout: of the ranks.
        device: where the stages are.
    """
    held: dict[str, Tensor] = {}
    for runner in executor.runners.values():
        held.update(runner.module.state_dict())
    owners = _owners(plan, layout)
    copies: dict[str, Tensor] = {}
    state = {}
    for name in outline.names:
        first = outline.state.first_name[name]
        if first in copies:
            state[name] = copies[first]
            continue
        if name in held:
            own = held[name].detach()
            value = own.clone(memory_format=torch.contiguous_format)
        else:
            form = outline.tensor(name)
            value = torch.empty(form.shape, dtype=form.dtype, device=device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(value, owners[name])
        state[name] = copies[first] = value.cpu()
    return state


def _owners(plan: Plan, layout: Layout) -> dict[str, int]:
    """The rank of the first replica that holds each name."""
    owners: dict[str, int] = {}
    for stage, names in enumerate(plan.state_names):
        device = plan.schedule.program.stages[stage].device
        for name in names:
            owners.setdefault(name, device)
    return owners
