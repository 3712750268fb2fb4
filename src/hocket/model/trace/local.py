"""Tensors of which each worker may hold a part: DTensors, one row block each.

torch's class is imported where a tensor is made sharded alone, for that takes a second.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether each worker holds a part of a tensor (a DTensor).

    torch's class is not imported for it, which takes a second.
    """
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return this worker's part of a tensor that may be sharded; it shares memory."""
    part: Any = tensor
    part = part.to_local() if is_sharded(tensor) else part
    # A collective may be under way.
    found: Tensor = part.wait() if hasattr(part, "trigger_wait") else part
    return found


def landed(value: Any) -> Any:
    """Return the result of a collective that may be under way, once it is there."""
    return value.clone() if hasattr(value, "trigger_wait") else value


def is_split(tensor: Tensor) -> bool:
    """Return whether each worker holds other elements of a tensor."""
    one: Any = tensor
    return is_sharded(tensor) and any(x.is_shard() for x in one.placements)


def reduce_gradient(parameter: Tensor) -> None:
    """Place a DTensor's gradient as its values are, which an update would do, too.

    Those that share it must call this: each may have a summand of the gradient.
    """
    one: Any = parameter
    if one.grad is not None and one.grad.placements != one.placements:
        one.grad = one.grad.redistribute(placements=one.placements)


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor that may be sharded; those that share it must call this.

    Of a sharded one it is a copy, gathered from them; any other is returned itself.
    """
    one: Any = tensor
    found: Tensor = one.full_tensor() if is_sharded(tensor) else tensor
    return found


def as_part(own: Tensor, like: Tensor) -> Tensor:
    """Return a tensor of which this worker has its own part.

    Args:
        own: what this worker has of it.
        like: a tensor of the whole's shape, which may be sharded.
    """
    if not is_sharded(like):
        return own
    one: Any = like
    found: Tensor = type(one.data).from_local(
        own,
        one.device_mesh,
        one.placements,
        run_check=False,
        shape=one.shape,
        stride=one.stride(),
    )
    return found


def part_of(value: Tensor, like: Tensor) -> Tensor:
    """Return of a whole tensor what a worker holds, in the way of another one.

    Args:
        value: the same on all workers that share it.
        like: a tensor of its shape, which may be sharded.
    """
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    one: Any = like
    here = value.to(one.device)
    found: Tensor = distribute_tensor(
        here, one.device_mesh, one.placements, src_data_rank=None
    )
    return found
