"""What a log of one thread's memory sees, by torch's profiler and by storages."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hocket.sharing.running.memory_log import (
    MemoryLog,
    StorageLog,
    Watched,
    open_log,
)

CPU = torch.device("cpu")


def watched(log: MemoryLog, *, made_before: bool) -> Watched:
    """Two iterations of a perceptron under a log, with weights from before or within.

    The log that is given has begun. Operators have no workspaces here, and gradients
    are made anew by each backward.
    """
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    x, y = torch.randn(128, 64), torch.randn(128, 64)
    if made_before:
        log.close()
        log = type(log)(CPU) if isinstance(log, StorageLog) else open_log(CPU)
    for _ in range(2):
        log.begin()
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).relu(), y)
        log.backward()
        loss.backward()
        optimizer.step()
        del loss
        log.end()
    seen = log.read()
    log.close()
    return seen


@pytest.mark.parametrize("made_before", [False, True])
def test_storages_are_the_allocators_blocks(*, made_before: bool) -> None:
    """Where the allocator says nothing, operators' outputs are what it would say.

    Weights and batches that are older than the log are held, too: a job of which they
    were not counted seemed to need 26 MB where its weights alone were 87. The allocator
    has no blocks of less than 512 bytes, and these round up.
    """
    storages = watched(StorageLog(CPU), made_before=made_before)
    blocks = watched(open_log(CPU), made_before=made_before)
    expected = blocks.forecast.curve.peak
    assert expected > 5 * 128 * 64 * 4
    assert storages.forecast.curve.peak == pytest.approx(expected, rel=0.05)
    older = 4 * (6 * 65 * 64 + 2 * 128 * 64) if made_before else 0
    assert storages.left_bytes == pytest.approx(blocks.left_bytes + older, rel=0.05)
    assert storages.grown_bytes == blocks.grown_bytes
    assert storages.forecast.forward_s > 0
    assert storages.forecast.backward_s > 0
