"""The oracle of flush-free pipelines: what delays mean, and that 0 means nothing."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.errors import ShapeError
from tests.run.support.plain_loop import make_optimizer, plain_loop
from tests.run.support.small_models import ZOO, batches, make_model

LR = 0.1


class Scale(nn.Module):
    """Multiplies by one weight."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """`weight * x`."""
        return self.weight * x


def two_scales() -> nn.Sequential:
    """`y = b * a * x`, whose gradients can be written down."""
    return nn.Sequential(Scale(1.5), Scale(-0.5))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """`w -= LR * g`."""
    return torch.optim.SGD(parameters, lr=LR)


def chain(delays: Sequence[int], num_microbatches: int = 1) -> hocket.Program:
    """One net, with a stage per delay."""
    return hocket.Program.chain(range(len(delays)), num_microbatches, delays=delays)


def half_square(output: Tensor, target: Tensor) -> Tensor:
    """With the gradient `output - target`."""
    return ((output - target) ** 2).mean() / 2


@pytest.mark.parametrize("delays", [(0, 0), (1, 0), (1, 1), (3, 1)])
def test_each_stage_reads_what_its_delay_promises(delays: tuple[int, int]) -> None:
    """`a(t+1) = a(t) - lr * da(a(t - i), b(t - j))`, written out for one sample."""
    model = two_scales()
    data = [(torch.tensor([[x]]).double(), torch.ones(1, 1).double()) for x in range(6)]
    losses = hocket.emulate(chain(delays), model, half_square, sgd, data, cut_at=["1"])
    a, b = [1.5], [-0.5]
    for t, (x, _) in enumerate(data):
        old_a, old_b = (w[max(0, t - d)] for w, d in zip((a, b), delays, strict=True))
        rest = old_b * old_a * x.item() - 1.0
        assert losses[t]["loss"] == pytest.approx(rest**2 / 2, rel=1e-12)
        a.append(a[t] - LR * rest * old_b * x.item())
        b.append(b[t] - LR * rest * old_a * x.item())
    found = [parameter.item() for parameter in model.parameters()]
    assert found == pytest.approx([a[-1], b[-1]], rel=1e-12)


@pytest.mark.parametrize("name", ["perceptron", "resnet"])
def test_without_delays_it_is_the_plain_loop(name: str) -> None:
    """Bit for bit: weights, buffers and losses, with an uneven last batch."""
    sizes = {"num_steps": 4, "batch_size": 14, "last": 9}
    expected, history = plain_loop(name, num_parts=4, **sizes)
    model = make_model(name)
    found = hocket.emulate(
        chain([0], 4),
        model,
        ZOO[name].loss,
        make_optimizer,
        batches(name, *sizes.values()),
    )
    assert found == history
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key]), key


def test_clipping_is_by_groups_of_one_delay() -> None:
    """A group is updated at one time, so its gradients are measured together."""
    data = [(torch.full((1, 1), 2.0).double(), torch.ones(1, 1).double())]
    rest, grads = -1.5 * 2 / 2 - 1.0, []
    grads = [rest * -0.5 * 2, rest * 1.5 * 2]
    for delays, norms in (
        ((1, 0), [abs(g) for g in grads]),
        ((1, 1), [(grads[0] ** 2 + grads[1] ** 2) ** 0.5] * 2),
    ):
        model = two_scales()
        hocket.emulate(
            chain(delays), model, half_square, sgd, data, cut_at=["1"], clip_norm=0.5
        )
        moved = [
            p.item() - w for p, w in zip(model.parameters(), (1.5, -0.5), strict=True)
        ]
        wanted = [-LR * g * 0.5 / n for g, n in zip(grads, norms, strict=True)]
        assert moved == pytest.approx(wanted, rel=1e-5)  # torch adds 1e-6 to the norm


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_a_tied_weight_has_one_age_and_all_of_its_gradient(delay: int) -> None:
    """Stages of one delay that share it are as one stage that uses it twice."""
    torch.manual_seed(0)
    data = [(torch.randn(4, 3).double(), torch.randn(4, 3).double()) for _ in range(5)]
    found = []
    for cut_at in ((), ("2",)):
        torch.manual_seed(1)
        shared = nn.Linear(3, 3)
        model = nn.Sequential(shared, nn.Tanh(), shared).double()
        delays = [delay] * (len(cut_at) + 1)
        history = hocket.emulate(
            chain(delays, 2), model, half_square, sgd, data, cut_at=cut_at
        )
        found.append((history[-1]["loss"], model[0].state_dict()["weight"]))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-12)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("delays", [(1, 0), (0, 1), (3, 1), (1, 2, 0)])
def test_a_tied_weight_has_the_largest_delay_of_its_stages(
    delays: tuple[int, ...],
) -> None:
    """Written out for `y = a * b * a * x`: `a` is as old in all of its stages.

    `b`, which stands beside it in the second stage, has that stage's age.
    """
    shared = Scale(1.5)
    model = nn.Sequential(shared, Scale(-0.5), shared)
    data = [(torch.tensor([[x]]).double(), torch.ones(1, 1).double()) for x in range(6)]
    cut_at = ["1", "2"][: len(delays) - 1]
    losses = hocket.emulate(chain(delays), model, half_square, sgd, data, cut_at=cut_at)
    a, b = [1.5], [-0.5]
    oldest = max(delays[0], delays[-1])
    for t, (x, _) in enumerate(data):
        old_a, old_b = a[max(0, t - oldest)], b[max(0, t - delays[1])]
        rest = old_a * old_b * old_a * x.item() - 1.0
        assert losses[t]["loss"] == pytest.approx(rest**2 / 2, rel=1e-12)
        a.append(a[t] - LR * rest * 2 * old_a * old_b * x.item())
        b.append(b[t] - LR * rest * old_a**2 * x.item())
    found = [parameter.item() for parameter in model.parameters()]
    assert found == pytest.approx([a[-1], b[-1]], rel=1e-12)


def test_a_tied_weight_is_clipped_with_the_stage_that_updates_it() -> None:
    """The first of those that have it the longest, and by all of its gradient."""
    shared = Scale(1.5)
    model = nn.Sequential(shared, Scale(-0.5), shared)
    data = [(torch.full((1, 1), 2.0).double(), torch.ones(1, 1).double())]
    hocket.emulate(
        chain([1, 0]), model, half_square, sgd, data, cut_at=["1"], clip_norm=0.5
    )
    moved = [p.item() - w for p, w in zip(model.parameters(), (1.5, -0.5), strict=True)]
    # Both gradients are larger, and each is alone in its group: scaled to 0.5.
    assert moved == pytest.approx([-LR * 0.5, LR * 0.5], rel=1e-5)


def test_batch_norms_see_every_batch_once() -> None:
    """Statistics have one version, the newest, whatever weights a stage reads."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 8), nn.Linear(8, 1)).double()
    data = [(torch.randn(8, 3).double(), torch.randn(8, 1).double()) for _ in range(5)]
    alone = copy.deepcopy(model[0])
    for inputs, _ in data:
        alone(inputs)
    hocket.emulate(chain([2, 0]), model, half_square, sgd, data, cut_at=["2"])
    found = model[0].state_dict()
    for key in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(found[key], alone.state_dict()[key]), key


def test_what_cannot_be_is_refused_with_a_way_out() -> None:
    """Other numbers of stages."""
    data = [(torch.ones(2, 1).double(), torch.ones(2, 1).double())]
    model = two_scales()
    with pytest.raises(ShapeError, match="makes 1 stages of net model, the prog"):
        hocket.emulate(chain([0, 1]), model, half_square, sgd, data)
