"""Running statistics of batch norms, where the number of replicas changes midway.

Of four microbatches, each replica's statistics see its own:

    4x1    replica 0: 0 1 2 3      as the plain loop
    2x2    replica 0: 0 1          replica 1: 2 3
    1x4    replica 0: 0            1: 1     2: 2     3: 3

Where the number changes, all replicas go on with the first one's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.run.support.forked_launch import launch_forked
from tests.run.support.freezing_workers import (
    ADAMW,
    NUM_PARTS,
    Model,
    make_batches,
    make_model,
)

NUM_FROZEN = [0, 0, 4, 4, 6, 6, 7, 7, 8]
REPLICAS = [1, 1, 2, 2, 4, 4, 4, 4, 4]
Buffers = dict[str, Tensor]


def freeze(model: Model, num_frozen: int) -> None:
    """Freeze the first blocks, with the stem before them."""
    frozen = [model.stem, *list(model.blocks)[:num_frozen]]
    for module in frozen if num_frozen else ():
        module.eval().requires_grad_(requires_grad=False)


def looped() -> tuple[list[float], Model, list[Buffers]]:
    """One process, with statistics for each replica; the losses and all statistics."""
    model = make_model(nn.BatchNorm1d, dropout=0.0)
    optimizer = ADAMW(model.parameters())
    sets: list[Buffers] = [{n: x.clone() for n, x in model.named_buffers()}]
    losses = []
    for (x, y), num_frozen, num in zip(
        make_batches(), NUM_FROZEN, REPLICAS, strict=True
    ):
        freeze(model, num_frozen)
        if len(sets) != num:
            sets = [{n: b.clone() for n, b in sets[0].items()} for _ in range(num)]
        total = 0.0
        parts = zip(x.tensor_split(NUM_PARTS), y.tensor_split(NUM_PARTS), strict=True)
        for number, (inputs, targets) in enumerate(parts):
            own = sets[number * num // NUM_PARTS]
            for name, buffer in model.named_buffers():
                buffer.copy_(own[name])
            loss = F.cross_entropy(model(inputs), targets, reduction="sum") / len(y)
            loss.backward()
            own.update({n: b.clone() for n, b in model.named_buffers()})
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model, sets


def test_each_replica_has_its_own_statistics(tmp_path: Path) -> None:
    """Losses, weights and statistics equal the loop's, which a frozen layer reads."""
    losses, model, sets = looped()
    entry = "freezing_workers:train_batch_norms"
    for results, replica, buffers, state in launch_forked(
        entry, num_workers=4, run_dir=tmp_path
    ):
        assert [x[0] for x in results] == NUM_FROZEN
        assert [int(x[1][-1]) for x in results] == REPLICAS
        assert [x[2] for x in results] == pytest.approx(losses, rel=1e-10)
        assert len(buffers) == len(sets[replica])
        for name, value in sets[replica].items():
            got = torch.tensor(buffers[name], dtype=value.dtype)
            torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-12)
        for name, value in model.named_parameters():
            got = torch.tensor(state[name], dtype=value.dtype)
            torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-12)
    last = [found["blocks.7.norm.running_mean"] for found in sets]
    assert not torch.allclose(last[0], last[1])  # replicas do differ
