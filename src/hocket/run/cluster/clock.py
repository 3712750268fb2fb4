"""Measures the offset between two hosts' clocks with messages there and back.

The fastest of eight rounds is the one that waited least; the error is at most half of
its time.

    other   sent_s ──▶                ──▶ back_s
    rank 0             its clock_s
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

NUM_PINGS: Final = 8


def clock_offset_s(rank: int, hosts: Sequence[str]) -> float:
    """Return how far rank 0's clock is ahead of this host's; 0 on its own host.

    Every worker must call this; one remote rank after another has its turn.

    Args:
        rank: this worker's rank.
        hosts: the host of each rank.
    """
    offset_s = 0.0
    for other, host in enumerate(hosts):
        if host != hosts[0] and rank in {0, other}:
            offset_s = ping(rank, 0 if rank else other)
    return offset_s if rank else 0.0


def ping(rank: int, peer: int) -> float:
    """Return how far rank 0's clock is ahead; both ranks call this at the same time.

    Args:
        rank: this worker's rank.
        peer: the other rank: 0, or on rank 0 the worker that measures.
    """
    message = torch.zeros(1, dtype=torch.float64)
    rounds = [(math.inf, 0.0)]  # how long each took, and the offset that it found
    for _ in range(NUM_PINGS):
        if rank == 0:
            dist.recv(message, peer)
            message[0] = time.perf_counter()
            dist.send(message, peer)
            continue
        sent_s = time.perf_counter()
        dist.send(message, peer)
        dist.recv(message, peer)
        back_s = time.perf_counter()
        rounds.append((back_s - sent_s, message.item() - (sent_s + back_s) / 2))
    return min(rounds)[1]
