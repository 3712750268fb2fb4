"""Prices the layers of a net that is cut again, by what its first layout has measured.

profile            each layer alone: forward, backward; and its forward once frozen
dry run            the first layout's stages, all workers at once
price of a layer   profile x (stages in the dry run / their layers in the profile)
"""

from __future__ import annotations

from dataclasses import replace

from hocket.freeze.greedy import Balance
from hocket.freeze.shapes import Frozen
from hocket.model.capture.captured import Captured
from hocket.model.trace.layers import Layer
from hocket.planner.stages import stage_costs
from hocket.planner.trial import StageSlowdown
from hocket.planner.work import Weights
from hocket.run.engine.plan import Plan


def price_layers(plan: Plan, outline: Captured, balance: Balance) -> Frozen:
    """Return the costs of a net's layers, none of which is frozen yet.

    Args:
        plan: the first layout's, with the profile; its stages' costs say how much
            longer layers take in place, and what updates take and keep.
        outline: the net, without values.
        balance: how stages are cut: see `hocket.PipelineConfig`.
    """
    stages = plan.costs.stages
    grad_bytes = sum(cost.gradient_bytes for cost in stages) or 1
    state = sum(cost.optimizer_bytes for cost in stages) / grad_bytes
    touched = sum(2 * x.gradient_bytes + x.optimizer_bytes for x in stages) or 1
    tensors = outline.state.tensors

    def weights_of(layer: Layer) -> tuple[Weights, ...]:
        found = []
        for name in (*layer.parameters, *layer.buffers):
            trained = tensors[name].nbytes * tensors[name].requires_grad
            num_bytes = tensors[name].nbytes
            found.append(Weights(name, num_bytes, trained, round(state * trained)))
        return tuple(found)

    pairs = zip(plan.profile.layers, outline.layers, strict=True)
    layers = [measured.cost(weights_of(layer)) for measured, layer in pairs]
    rate = sum(cost.update_s for cost in stages) / touched
    alone = stage_costs(
        layers, plan.boundaries, recomputes=False, update_s_per_byte=rate
    )
    in_place = StageSlowdown.of(stages, alone)
    return Frozen(
        [in_place.of_layer(layer) for layer in layers],
        0,
        rate,
        replace(plan.costs, stages=(), links=()),
        [in_place.forward * forward_s for forward_s in plan.frozen_s],
        sizes=outline.parameters_in_millions if balance == "greedy" else None,
    )
