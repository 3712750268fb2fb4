"""Counts an optimizer's state for each parameter, without allocating it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from hocket.model.trace.local import local

_SMALL: Final = 4  # the longest dimension of the small copies

Named = dict[str, nn.Parameter]
MakeOptimizer = Callable[[Named], torch.optim.Optimizer]


def optimizer_bytes(
    parameters: Mapping[str, Tensor], make_optimizer: MakeOptimizer
) -> dict[str, int]:
    """Return the bytes of state per parameter, after a first step.

    The optimizer takes its step on fake copies, which have no data. One that cannot
    takes it on small real ones, and what it keeps per byte of them is scaled up.

    Args:
        parameters: the trained parameters, by name.
        make_optimizer: called with named parameters.
    """
    with contextlib.suppress(Exception), FakeTensorMode():
        copies = {
            name: nn.Parameter(torch.empty(local(x).shape, dtype=x.dtype))
            for name, x in parameters.items()
        }
        if found := _after_step(copies, make_optimizer):
            return found
    small = small_copies(parameters)
    found = _after_step(small, make_optimizer)
    return {
        name: round(found.get(name, 0) / max(1, small[name].nbytes) * local(x).nbytes)
        for name, x in parameters.items()
    }


def small_copies(parameters: Mapping[str, Tensor]) -> Named:
    """Return small parameters of the same names, types and numbers of dimensions."""
    return {
        name: nn.Parameter(
            torch.zeros([min(length, _SMALL) for length in x.shape], dtype=x.dtype)
        )
        for name, x in parameters.items()
    }


def _after_step(copies: Named, make_optimizer: MakeOptimizer) -> dict[str, int]:
    """Return the state by parameter, made by a first step."""
    if not copies:
        return {}
    for copy in copies.values():
        copy.grad = torch.zeros_like(copy)
    optimizer = make_optimizer(copies)
    with contextlib.suppress(Exception):  # it may read numbers of fake tensors
        optimizer.step()
    return {
        name: _num_bytes(optimizer.state[copy])
        for name, copy in copies.items()
        if copy in optimizer.state
    }


def _num_bytes(state: Any) -> int:
    return sum(x.nbytes for x in pytree.tree_leaves(state) if isinstance(x, Tensor))
