"""Two replicas that train in two waves, beside the formula in one process."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import hocket
from hocket.errors import CheckpointError
from hocket.run.cluster.group import WorkerGroup
from hocket.run.cluster.world import World
from tests.run.support.joined import join
from tests.sharing.support.wave_nets import (
    adamw,
    difference,
    halving,
    losses,
    make_batches,
    make_net,
)
from tests.sharing.support.wave_oracle import emulate_waves

NUM_STEPS = 20
CLIP_NORM = 0.3


def train_and_resume(folder: str) -> dict[str, dict[str, Any]]:
    """Train with each kind of sync, and once more from the middle."""
    with closing(join()) as world:
        return {sync: _report(sync, Path(folder), world) for sync in ("wave", "exact")}


def _report(sync: Any, folder: Path, world: World) -> dict[str, Any]:
    num_parts = 2 if sync == "exact" else 1
    batches = make_batches(NUM_STEPS, last=9)
    with (
        _made(sync, world) as waves,
        patch.object(
            WorkerGroup, "all_reduce", autospec=True, side_effect=WorkerGroup.all_reduce
        ) as reductions,
    ):
        results = list(waves.train(batches, drain_every=lambda n: n == 6))
        num = reductions.call_count
        state = waves.state_dict()
    with _made(sync, world) as waves:
        for result in waves.train(batches, drain_every=7):
            if result.step == 6:
                waves.save(folder / sync)
    with _made(sync, world) as waves:
        waves.load(folder / sync)
        list(waves.train(batches[7:]))
        resumed = waves.state_dict()
    with _made(sync, world, seed=5) as waves:
        try:
            waves.load(folder / sync)
            refused = ""
        except CheckpointError as error:
            refused = str(error)
    expected, (net, *_) = emulate_waves(
        make_net(),
        losses,
        adamw,
        batches,
        sync=sync,
        num_microbatches=num_parts,
        num_replicas=2,
        scheduler=halving,
        clip_norm=CLIP_NORM,
    )
    known = net.state_dict()
    if world.rank:  # its buffers are its own: batch norm saw other samples
        known |= {name: state[name] for name, _ in make_net().named_buffers()}
    return {
        "difference": difference(state, known),
        "losses": max(
            abs(x.losses[k] - y[k]) / abs(y[k])
            for x, y in zip(results, expected, strict=True)
            for k in y
        ),
        "resumed_bit_equal": all(
            torch.equal(x, resumed[k])
            for k, x in state.items()
            if not world.rank or ("running" not in k and "num_batches" not in k)
        ),
        "reductions": num,
        "refused": refused,
    }


def _made(sync: Any, world: World, seed: int = 0) -> hocket.Waves:
    return hocket.Waves(
        make_net(),
        losses,
        optimizer=adamw,
        scheduler=halving,
        clip_norm=CLIP_NORM,
        sync=sync,
        seed=seed,
        world=world,
    )
