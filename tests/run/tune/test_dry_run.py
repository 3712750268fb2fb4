"""Before the first step each worker plays its lane alone, and leaves nothing behind."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import hocket
from hocket.run.data.batch import BatchOutput
from tests.model.capture.test_submodules import Notes, X
from tests.model.profile.test_measure import check_notes
from tests.run.support.plain_loop import make_optimizer
from tests.run.support.small_models import ZOO, batches, make_model
from tests.run.support.started import started


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *(("resnet", "1f1b"), ("tied-dropout", "1f1b")),
        *(("resnet", "wpipe"), ("dropout", "pipedream-2bw")),
    ],
)
def test_nothing_is_left_behind(name: str, schedule: str) -> None:
    """No gradient, no statistic of a batch norm, no mode, no random number."""
    model = make_model(name)
    before = copy.deepcopy(model.state_dict())
    (batch,) = batches(name, 1, 8, 8)
    generator = torch.default_generator.get_state()

    with _pipeline(name, model, batch, schedule):
        assert torch.equal(torch.default_generator.get_state(), generator)
        assert all(p.grad is None for p in model.parameters())
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key]), key


def test_forwards_of_teachers_leave_nothing_behind() -> None:
    """They run in the lane, too: a batch norm in training mode keeps its statistics."""
    model, teacher = make_model("resnet"), make_model("resnet")
    before = [copy.deepcopy(net.state_dict()) for net in (model, teacher)]
    (batch,) = batches("resnet", 1, 8, 8)

    with started(
        model,
        _difference,
        make_optimizer,
        batch,
        num_microbatches=4,
        teachers={"teacher": hocket.Teacher(teacher, mode="train")},
    ) as pipeline:
        plan = pipeline.plan
        assert plan.costs.op_s > 0  # known from lanes alone
        for net, state in zip((model, teacher), before, strict=True):
            for key, value in net.state_dict().items():
                assert torch.equal(value, state[key]), key
        assert pipeline.step(batch).step == 0


def _difference(
    output: torch.Tensor, targets: torch.Tensor, teachers: dict[str, BatchOutput]
) -> torch.Tensor:
    return F.cross_entropy(output, targets) + F.mse_loss(
        output, teachers["teacher"].own
    )


def test_modules_forget_what_they_noted() -> None:
    """They count calls and assign buffers anew, and training finds them untouched."""
    model = Notes()
    buffers = dict(model.named_buffers())

    with started(
        model,
        F.mse_loss,
        make_optimizer,
        (torch.cat([X, X]), torch.zeros(8, 6)),
        schedule="interleaved-1f1b",
        stages_per_device=2,
        cut=["b"],
    ) as pipeline:
        check_notes(model, buffers)
        pipeline.step((torch.cat([X, X]), torch.zeros(8, 6)))
        assert model.a.calls == 2


def test_ops_cost_what_they_took_in_the_lane() -> None:
    """Costs come from the lane; how a backward divides comes from the profile."""
    model = make_model("perceptron")
    (batch,) = batches("perceptron", 1, 8, 8)

    with _pipeline("perceptron", model, batch) as pipeline:
        (cost,) = pipeline.plan.costs.stages
        layers = pipeline.plan.profile.layers
        steps = [pipeline.step(batch) for _ in range(3)]

    assert pipeline.plan.costs.op_s > 0
    assert 0 <= pipeline.plan.costs.jitter <= 0.3
    assert cost.forward_s > 0
    input_grad_s = sum(layer.input_grad_s for layer in layers)
    weight_grad_s = sum(layer.weight_grad_s for layer in layers)
    share = cost.input_grad_s / (cost.input_grad_s + cost.weight_grad_s)
    assert share == pytest.approx(input_grad_s / (input_grad_s + weight_grad_s))
    assert [step.step for step in steps] == [0, 1, 2]


def test_modules_keep_the_modes_that_the_loop_sets() -> None:
    """Before, each step switched them back: a frozen batch norm went on counting."""
    model = make_model("dropout")
    (batch,) = batches("dropout", 1, 8, 8)
    layers = [*model.children()]

    with _pipeline("dropout", model, batch) as pipeline:
        for part in (layers[1], model):
            pipeline.step(batch)
            part.eval()
            pipeline.step(batch)
            assert not any(x.training for x in part.modules())


def _pipeline(
    name: str, model: torch.nn.Module, batch: object, schedule: str = "1f1b"
) -> hocket.Pipeline:
    return started(
        model,
        ZOO[name].loss,
        make_optimizer,
        batch,
        schedule=schedule,
        num_microbatches=4,
    )
