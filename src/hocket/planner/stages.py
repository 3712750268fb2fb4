"""Adds up layers into stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hocket.core.costs import StageCost
from hocket.planner.layer_bytes import (
    activation_bytes,
    backward_work_bytes,
    forward_work_bytes,
    input_grad_work_bytes,
    weight_grad_held_bytes,
    weight_grad_work_bytes,
)
from hocket.planner.work import LayerCost


def stage_costs(
    layers: Sequence[LayerCost],
    boundaries: Sequence[int],
    *,
    recomputes: bool,
    update_s_per_byte: float,
) -> tuple[StageCost, ...]:
    """Return the cost of each stage.

    Args:
        layers: the whole model's layers.
        boundaries: the layers at which stages 1, 2, ... begin.
        recomputes: whether the stages keep only their inputs.
        update_s_per_byte: seconds of the optimizer's step per byte.
    """
    edges = (0, *boundaries, len(layers))
    return tuple(
        _stage(layers, begin, end, recomputes, update_s_per_byte)
        for begin, end in pairwise(edges)
    )


def _stage(
    layers: Sequence[LayerCost],
    begin: int,
    end: int,
    recomputes: bool,
    update_s_per_byte: float,
) -> StageCost:
    own = layers[begin:end]
    weights = {x.name: x for layer in own for x in layer.weights}.values()
    weight_bytes = sum(x.num_bytes for x in weights)
    gradient_bytes = sum(x.gradient_bytes for x in weights)
    optimizer_bytes = sum(x.optimizer_bytes for x in weights)
    trained_bytes = 2 * gradient_bytes + optimizer_bytes  # weights as many as gradients
    return StageCost(
        forward_s=sum(layer.forward_s for layer in own),
        input_grad_s=sum(layer.input_grad_s for layer in own),
        weight_grad_s=sum(layer.weight_grad_s for layer in own),
        update_s=trained_bytes * update_s_per_byte,
        output_bytes=layers[end].received_bytes if end < len(layers) else 0,
        input_grad_bytes=own[0].received_grad_bytes,
        activation_bytes=activation_bytes(own),
        weight_grad_held_bytes=weight_grad_held_bytes(own),
        weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        forward_work_bytes=forward_work_bytes(own),
        backward_work_bytes=backward_work_bytes(own),
        input_grad_work_bytes=input_grad_work_bytes(own),
        weight_grad_work_bytes=weight_grad_work_bytes(own),
        recomputes=recomputes,
        split_s=max(0.0, sum(layer.split_s for layer in own)),
    )
