"""One worker computes what all are compared with.

Emulating a whole job takes as long as the job, on each worker that does it. What every
worker got must be the same bit for bit; so one comparison is good for all.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.run.cluster.world import World


def compared_on_rank_0(
    world: World, found: Mapping[str, Any], difference: Callable[[], float]
) -> float:
    """How far from the oracle; infinity if two workers got different numbers.

    Args:
        world: the job.
        found: tensors and numbers that are the same on every worker.
        difference: computes the oracle, and compares; called on rank 0.
    """
    digests = world.gather_json(digest_of(found), "digest of what was found")
    if len({*map(str, digests)}) > 1:
        return float("inf")
    answer = repr(difference()) if world.rank == 0 else ""
    return float(str(world.broadcast_json(answer, name="difference to the oracle")))


def digest_of(found: Mapping[str, Any]) -> int:
    """Of the bits of all tensors, and the text of all else."""
    digest = 0
    for leaf in pytree.tree_leaves(dict(found)):
        own = _bits(leaf) if isinstance(leaf, Tensor) else repr(leaf).encode()
        digest = zlib.crc32(own, digest)
    return digest


def _bits(tensor: Tensor) -> bytes:
    own = tensor.detach().cpu().contiguous().reshape(-1)
    return own.view(torch.uint8).numpy().tobytes()
