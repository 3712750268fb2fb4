"""Trains sleeping models in a pipeline, and compares what they did with its order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import process_time
from typing import Any

import torch

import hocket
from bench.emulated.layers import DONE, LayerSeconds, SleepingModel, mean_difference
from hocket.core.timelines.timeline import Origin, Timeline
from hocket.run.cluster.world import World


def sleeping_pipeline(
    layer: LayerSeconds,
    num_layers: int,
    layers_per_stage: int,
    num_channels: int,
    **settings: Any,
) -> hocket.Pipeline:
    """Return a pipeline of equal layers that sleep; updates change nothing.

    Args:
        layer: the seconds of each layer.
        num_layers: the model's layers.
        layers_per_stage: the layers of each stage.
        num_channels: the size of its messages.
        settings: further arguments of the pipeline.
    """
    torch.manual_seed(0)
    return hocket.Pipeline(
        SleepingModel([layer] * num_layers, num_channels),
        mean_difference,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        cut=[
            f"layers.{i}" for i in range(layers_per_stage, num_layers, layers_per_stage)
        ],
        **settings,
    )


@dataclass(frozen=True, slots=True)
class Rounds:
    """What some rounds of training did.

    Args:
        timelines: the measured timeline of each round.
        in_order: whether all devices kept the order of ops, in all rounds.
        busy_cores: the seconds of all processes per second.
    """

    timelines: list[Timeline]
    in_order: bool
    busy_cores: float


def train_rounds(
    world: World,
    pipeline: hocket.Pipeline,
    train: Callable[[], object],
    due: Sequence[Any],
    num_rounds: int,
) -> Rounds:
    """Train a round to warm up, then the rounds that count.

    Args:
        world: all workers.
        pipeline: the pipeline.
        train: trains one round.
        due: what this device's layers must do in a round, in order.
        num_rounds: the rounds that count.
    """
    timelines, is_kept, own_s = [], True, 0.0
    for number in range(1 + num_rounds):
        DONE.clear()
        begin_s = process_time()
        train()
        is_kept = is_kept and [*due] == DONE
        if number:
            own_s += process_time() - begin_s
            timelines.append(replace(pipeline.measured(), origin=Origin.EMULATED))
    in_order = all(world.gather_json(is_kept))
    busy_s = sum(world.gather_json(own_s))
    seconds = sum(timeline.makespan_s for timeline in timelines)
    return Rounds(timelines, in_order, round(busy_s / seconds, 3))
