"""All gradients looked at together, in one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hocket.run.weights.gradients import Gradients, GradientStatus

CPU = torch.device("cpu")


def model_with_gradients(dtype: torch.dtype) -> nn.Module:
    """Layers with gradients of all sizes; one parameter has none."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(37, 37) for _ in range(9))).to(dtype)
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn_like(parameter) * 10.0 ** (i % 5 - 2)
    model[4].bias.grad = None
    return model


def gradients_of(model: nn.Module) -> Gradients:
    """Those of a worker that is alone."""
    held = dict(model.named_parameters())
    dtype = next(model.parameters()).dtype
    names = tuple(held)
    return Gradients(names, held, frozenset(held), None, device=CPU, dtype=dtype)


def judged(model: nn.Module) -> GradientStatus:
    """What a worker that is alone finds out."""
    gradients = gradients_of(model)
    return gradients.post(0).value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clips_as_torch_does(dtype: torch.dtype, max_norm: float) -> None:
    """The norm and the gradients, to the last bit."""
    ours, theirs = model_with_gradients(dtype), model_with_gradients(dtype)
    gradients = gradients_of(ours)
    status = gradients.post(0).value
    gradients.clip(status.norm, max_norm)
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)

    assert status.norm == norm.item()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_names_the_first_at_fault(value: float) -> None:
    """One element is enough; of several parameters, the model's first is named."""
    model = model_with_gradients(torch.float32)
    for name in ("5.weight", "3.weight"):
        grad = model.get_parameter(name).grad
        assert grad is not None
        grad[3, 4] = value
    status = judged(model)
    assert not status.is_finite
    assert status.culprit == "3.weight"


def test_names_the_largest_where_only_the_sum_overflows() -> None:
    """No single gradient is at fault then."""
    model = model_with_gradients(torch.float32)
    for name, size in (("1.weight", 2e19), ("6.weight", 3e19)):
        grad = model.get_parameter(name).grad
        assert grad is not None
        grad.zero_()[0, 0] = size / 2
        grad[1, 1] = size / 4
    for name in ("7.weight", "8.weight"):
        grad = model.get_parameter(name).grad
        assert grad is not None
        grad.zero_()[0, 0] = 1.8e19
    status = judged(model)
    assert not status.is_finite
    assert status.culprit == "7.weight"


def test_sparse_gradients_have_norms_too() -> None:
    """An embedding's; a row that was looked up twice counts as its sum."""
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 1, 5])).sum().backward()
    assert judged(embedding).norm == pytest.approx(math.sqrt(4 * 5))


def test_without_any_gradient() -> None:
    """Everything may be frozen, or unused."""
    assert judged(nn.Linear(2, 2)).norm == 0.0
