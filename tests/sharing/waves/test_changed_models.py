"""What a loop changes between batches both waves follow, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import pytest
import torch
from torch import Tensor, nn

import hocket

NUM_STEPS: Final = 6
Change: TypeAlias = Callable[[int, Any], None]


class Net(nn.Module):
    """Has a temperature, a dropout of rate 0, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.0)
        self.last = nn.Linear(16, 3)
        self.temperature = 1.0
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Samples by 3; counts its calls."""
        self.num_calls += 1
        x = self.drop(torch.tanh(self.norm(self.first(x)) / self.temperature))
        return self.last(x)


def temperature(step: int, net: Net) -> None:
    """Another one with each step."""
    net.temperature = 1.0 + step / 10


def rate(step: int, net: Net) -> None:
    """All is dropped from step 2 on."""
    net.drop.p = float(step >= 2)


def evaluated(step: int, net: Net) -> None:
    """The statistics stay from step 2 on."""
    net.norm.train(step < 2)


def hooked(step: int, net: Net) -> None:
    """A hook that doubles, from step 2 on."""
    if step == 2:
        net.first.register_forward_hook(lambda module, args, out: 2 * out)


def replaced(step: int, net: Net) -> None:
    """A layer without weights in the place of another."""
    if step == 2:
        net.drop = nn.Tanh()  # type: ignore[assignment]


def frozen(step: int, net: Net) -> None:
    """The first layer, for two steps."""
    net.first.requires_grad_(step not in (2, 3))


def another_weight(step: int, net: Net) -> None:
    """A parameter that no optimizer has."""
    if step == 2:
        net.last.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def another_layer(step: int, net: Net) -> None:
    """One with weights that no optimizer has."""
    if step == 2:
        net.last = nn.Linear(16, 3).double()


def doubling(step: int, net: Net) -> None:
    """A hook on a gradient, from step 2 on."""
    if step == 2:
        net.last.weight.register_hook(lambda gradient: 2 * gradient)


def bounding(step: int, net: Net) -> None:
    """A hook on what adds up, from step 2 on."""

    def bound(weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad.clamp_(-0.01, 0.01)

    if step == 2:
        net.last.weight.register_post_accumulate_grad_hook(bound)


def make_net() -> Net:
    """The same each time, in float64."""
    torch.manual_seed(0)
    return Net().double()


def batches() -> list[tuple[Tensor, Tensor]]:
    """A batch per step."""
    rng = torch.Generator().manual_seed(1)
    made = [torch.randn(8, 9, generator=rng).double() for _ in range(NUM_STEPS)]
    return [(x[:, :6], x[:, 6:]) for x in made]


def sgd(weights: Any) -> torch.optim.Optimizer:
    """The optimizer of all runs."""
    return torch.optim.SGD(weights, 0.1, momentum=0.9)


def make_waves(net: nn.Module, sync: Any) -> hocket.Waves:
    """Two microbatches where a batch has several."""
    return hocket.Waves(
        net,
        nn.functional.mse_loss,
        optimizer=sgd,
        sync=sync,
        num_microbatches=2 if sync == "exact" else None,
    )


@pytest.mark.parametrize(
    "change", [temperature, rate, evaluated, hooked, replaced, frozen]
)
def test_exact_waves_train_as_a_loop_that_changes_its_model(change: Change) -> None:
    """Past bug: tock went on with the model that it had copied at first."""
    net, own = make_net(), make_net()
    optimizer = sgd(net.parameters())
    with make_waves(own, "exact") as waves:
        for step, (inputs, targets) in enumerate(batches()):
            change(step, net)
            optimizer.zero_grad()
            for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
                (nn.functional.mse_loss(net(x), y) / 2).backward()
            optimizer.step()
            change(step, own)
            waves.step((inputs, targets))
        found = waves.state_dict()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def test_waves_of_batches_follow_what_is_set_in_one_module() -> None:
    """As where both read the number from one place."""
    shared = [1.0]

    class Reading(Net):
        """Reads its temperature outside."""

        temperature = property(lambda self: shared[0], lambda self, value: None)

    losses: list[list[float]] = []
    for kind in (Net, Reading):
        torch.manual_seed(0)
        net = kind().double()
        with make_waves(net, "wave") as waves:
            losses.append([])
            for step, batch in enumerate(batches()):
                shared[0] = 1.0 + step / 10
                temperature(step, net)
                losses[-1].append(waves.step(batch).loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("change", "sync"),
    [
        (another_weight, "exact"),
        (another_weight, "wave"),
        (another_layer, "exact"),
        (another_layer, "wave"),
        (frozen, "wave"),
        (doubling, "exact"),
        (doubling, "wave"),
        (bounding, "exact"),
        (bounding, "wave"),
    ],
)
def test_what_an_optimizer_does_not_know_is_refused(change: Change, sync: str) -> None:
    """By name, with the step."""
    net = make_net()
    with make_waves(net, sync) as waves:
        for step, batch in enumerate(batches()[:2]):
            change(step, net)
            waves.step(batch)
        change(2, net)
        with pytest.raises(
            hocket.ModelError, match=r"step 2.*(bias|last|requires_grad)"
        ):
            waves.step(batches()[2])


@pytest.mark.parametrize("sync", ["exact", "wave"])
def test_an_evaluation_hides_no_change_and_makes_none(sync: str) -> None:
    """What is set before it is followed; what its forwards count up is no change."""
    found = []
    for evaluates in (False, True):
        net = make_net()
        with make_waves(net, sync) as waves:
            losses = []
            for step, batch in enumerate(batches()):
                temperature(step, net)
                if evaluates:
                    net.norm.eval()
                    waves.evaluate(batches()[:1])
                    net.norm.train()
                losses.append(waves.step(batch).loss)
        found.append(losses)
    assert found[0] == found[1]


def test_a_change_that_batches_under_way_would_see_is_refused() -> None:
    """With `drain_every` it is followed."""
    net = make_net()
    with make_waves(net, "wave") as waves:
        results = waves.train(batches())
        next(results)
        net.temperature = 1.5
        with pytest.raises(hocket.ModelError, match=r"temperature.*drain_every"):
            list(results)
    net = make_net()
    with make_waves(net, "wave") as waves:
        for result in waves.train(batches(), drain_every=2):
            if result.step == 1:
                net.temperature = 1.5
        assert waves.num_steps == NUM_STEPS
        assert net.num_calls == NUM_STEPS // 2  # what forwards change is no change
