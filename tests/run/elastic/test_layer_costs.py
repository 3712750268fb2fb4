"""Layers of a net that is cut again cost what its first layout has measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from hocket.core.costs import StageCost
from hocket.model.capture.capture import capture
from hocket.run.elastic.reshape import price_layers
from hocket.run.engine.plan import Plan
from hocket.run.nets.freezable import freezable_modules
from tests.run.elastic.test_refusals import batch, make_pipeline


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Of one worker and two microbatches."""
    with make_pipeline(tmp_path_factory.mktemp("run")) as pipeline:
        return pipeline.plan


def priced(plan: Plan, num_frozen: int) -> StageCost:
    """The costs of the whole net, or of what is frozen."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    cut = freezable_modules(model, None)[1:]
    outline = capture(model, (batch()[0][:4],), cut=cut)
    frozen = replace(price_layers(plan, outline, "exact"), num_frozen=num_frozen)
    assert frozen.beside == replace(plan.costs, stages=(), links=())
    return frozen.costs(frozen.boundaries(1)).stages[0]


def test_layers_add_up_to_what_the_dry_run_measured(plan: Plan) -> None:
    """Forwards, backwards, the update, and every byte of weights and their state."""
    (measured,), found = plan.costs.stages, priced(plan, 0)
    for name in ("forward_s", "update_s"):
        assert getattr(found, name) == pytest.approx(getattr(measured, name))
    backward_s = found.input_grad_s + found.weight_grad_s
    assert backward_s == pytest.approx(measured.input_grad_s + measured.weight_grad_s)
    for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes"):
        assert getattr(found, name) == getattr(measured, name)


def test_frozen_layers_cost_their_forwards_without_gradients(plan: Plan) -> None:
    """As much longer as other forwards take in place."""
    assert len(plan.frozen_s) == len(plan.profile.layers)
    assert all(each_s > 0 for each_s in plan.frozen_s)
    alone_s = sum(layer.forward_s for layer in plan.profile.layers)
    in_place = plan.costs.stages[0].forward_s / alone_s
    frozen = priced(plan, 2)
    assert frozen.forward_s == pytest.approx(in_place * sum(plan.frozen_s[:2]))
    assert frozen.input_grad_s == frozen.weight_grad_s == frozen.update_s == 0
