"""LARS: the paper's formula, and what it is for."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hocket.teacher.lars import Lars

scales = st.floats(1e-3, 1e3)


def stepped(
    weight: Tensor, gradient: Tensor, num_steps: int = 1, **options: Any
) -> Tensor:
    """A parameter after some steps along one gradient."""
    parameter = nn.Parameter(weight.clone())
    optimizer = Lars([parameter], **{"lr": 0.5, "momentum": 0.0, **options})
    for _ in range(num_steps):
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


@given(scale=scales)
def test_a_step_is_a_share_of_the_weights_whatever_the_gradients_size(
    scale: float,
) -> None:
    """`lr * trust * |w|`: what large batches need."""
    torch.manual_seed(0)
    weight, gradient = torch.randn(4, 3).double(), torch.randn(4, 3).double()
    moved = weight - stepped(weight, scale * gradient, trust=0.01)
    assert float(moved.norm()) == pytest.approx(0.5 * 0.01 * float(weight.norm()))
    direction = moved / moved.norm() - gradient / gradient.norm()
    assert float(direction.norm()) == pytest.approx(0, abs=1e-9)


def test_two_steps_by_hand() -> None:
    """Algorithm 1 of arXiv:1708.03888, with momentum and weight decay."""
    torch.manual_seed(0)
    weight, gradient = torch.randn(3, 2).double(), torch.randn(3, 2).double()
    lr, momentum, decay, trust = 0.5, 0.9, 0.1, 0.02
    expected, velocity = weight.clone(), torch.zeros_like(weight)
    for _ in range(2):
        size = expected.norm()
        rate = trust * size / (gradient.norm() + decay * size)
        velocity = momentum * velocity + lr * rate * (gradient + decay * expected)
        expected = expected - velocity

    found = stepped(
        weight, gradient, 2, momentum=momentum, weight_decay=decay, trust=trust
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_vectors_and_zeros_step_as_under_sgd() -> None:
    """A bias, a matrix that is zero, and one whose gradient is."""
    bias, zero, weight = torch.ones(3), torch.zeros(2, 2), torch.ones(2, 2)
    assert torch.equal(stepped(bias, torch.ones(3)), torch.full((3,), 0.5))
    assert torch.equal(stepped(zero, torch.ones(2, 2)), torch.full((2, 2), -0.5))
    assert torch.equal(stepped(weight, torch.zeros(2, 2)), weight)


@pytest.mark.parametrize("decays", [False, True])
def test_biases_and_norms_have_no_weight_decay_unless_asked_for(decays: bool) -> None:
    """As BYOL and MoCo-v3 train them: two steps of plain momentum SGD."""
    weight, gradient = torch.randn(2, 3).double()
    options: dict[str, Any] = {
        "momentum": 0.9,
        "weight_decay": 0.1,
        "decays_vectors": decays,
    }
    expected = nn.Parameter(weight.clone())
    sgd = torch.optim.SGD([expected], 0.5, 0.9, weight_decay=0.1 * decays)
    for _ in range(2):
        expected.grad = gradient
        sgd.step()
    torch.testing.assert_close(
        stepped(weight, gradient, 2, **options), expected.detach()
    )


def test_its_state_goes_on() -> None:
    """What a checkpoint keeps is enough to go on with."""
    torch.manual_seed(0)
    gradient = torch.randn(3, 2)
    whole = nn.Parameter(torch.ones(3, 2))
    first = Lars([whole], 0.5)
    whole.grad = gradient
    first.step()
    half = nn.Parameter(whole.detach().clone())
    second = Lars([half], 0.5)
    second.load_state_dict(deepcopy(first.state_dict()))
    half.grad = gradient
    first.step()
    second.step()
    assert torch.equal(whole, half)
