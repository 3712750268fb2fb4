"""Bring together what the workers hold: the model's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.core.program import Program
from hocket.model.stages.outline import Outline
from hocket.run.stage.runner import StageRunner


def gather_state(
    outline: Outline,
    runners: Iterable[StageRunner],
    holders: Mapping[str, int],
    device: torch.device,
) -> dict[str, Tensor]:
    """The uncut model's state, collected from the first replica's stages.

    Every worker must call this, and gets the whole state. Copies, on the CPU; of a tied
    weight one, under each of its names.

    Args:
        outline: the uncut model's, for names, shapes and order.
        runners: this worker's stages of the model.
        holders: a rank of the first replica that holds each name.
        device: where the stages are.
    """
    held: dict[str, Tensor] = {}
    for runner in runners:
        held.update(runner.module.state_dict())
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
            dist.broadcast(value, holders[name])
        state[name] = copies[first] = value.cpu()
    return state


def holders_of(
    program: Program, state_names: Mapping[int, Sequence[str]]
) -> dict[str, int]:
    """Return the rank of the first replica's device that holds each name.

    Args:
        program: says which device holds which stage.
        state_names: the names in each stage's `state_dict()`, for one model.
    """
    holders: dict[str, int] = {}
    for stage, names in state_names.items():
        for name in names:
            holders.setdefault(name, program.stages[stage].device)
    return holders
