"""What holds for every correction: the oracle, no delay, going on from a checkpoint."""

from __future__ import annotations

import copy
import json
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.errors import ConfigError
from hocket.options import CorrectionName
from hocket.run.cluster.store.values import decode, encode
from hocket.run.weights.settings import TrainingConfig
from hocket.run.weights.updater import Updater
from tests.run.support.optimizers import OPTIMIZERS
from tests.run.weights.correction.one_weight import descent

NAMES: tuple[CorrectionName, ...] = get_args(CorrectionName)
LR, MOMENTUM = 0.05, 0.8


def small_model() -> nn.Sequential:
    """Of two stages."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def small_data(num_steps: int) -> list[tuple[Tensor, Tensor]]:
    """Batches for it."""
    torch.manual_seed(1)
    return [
        (torch.randn(6, 3).double(), torch.randn(6, 2).double())
        for _ in range(num_steps)
    ]


def by_hand(correction: str, delays: tuple[int, ...], num_steps: int) -> list[Tensor]:
    """Every parameter with lists of what it was, what was read, and what was added."""
    model = small_model()
    ages = [delay for delay in delays for _ in range(2)]  # a weight and a bias each
    lists: list[tuple[list[Tensor], list[Tensor], list[Tensor]]] = [
        ([p.detach().clone()], [p.detach().clone()], []) for p in model.parameters()
    ]
    moved = [torch.zeros_like(p) for p in model.parameters()]
    for t, (inputs, targets) in enumerate(small_data(num_steps)):
        with torch.no_grad():
            for p, d, (_, reads, _) in zip(
                model.parameters(), ages, lists, strict=True
            ):
                p.copy_(reads[max(0, t - d)])
        loss = nn.functional.mse_loss(model(inputs), targets)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for i, (d, (w, reads, u)) in enumerate(zip(ages, lists, strict=True)):
            fades = correction == "lr-discount"
            rate = LR / (1 + d) ** (1 - t / 1000) if fades else LR
            moved[i] = MOMENTUM * moved[i] + grads[i]
            u.append(-rate * moved[i])
            before = u[t - d] if t >= d else torch.zeros_like(u[t])
            feeds = correction == "error-feedback"
            w.append(w[t] + u[t] + (u[t] - before if feeds else 0.0))
            predicts_from_state = correction == "weight-prediction"
            reads.append(w[-1] - d * LR * moved[i] if predicts_from_state else w[-1])
    return [w[-1] for w, _, _ in lists]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("delays", [(1, 0), (1, 1), (3, 1)])
def test_the_oracle_equals_a_loop_by_hand(
    name: CorrectionName, delays: tuple[int, int]
) -> None:
    """And comes to the same, bit for bit, when it is asked again."""
    found = []
    for _ in range(2):
        model = small_model()
        hocket.emulate(
            hocket.Program.chain(range(2), 1, delays=delays),
            model,
            nn.functional.mse_loss,
            descent(LR, MOMENTUM),
            small_data(12),
            cut_at=["2"],
            correction=name,
        )
        found.append([p.detach() for p in model.parameters()])
    expected = by_hand(name, delays, 12)
    for once, again, wanted in zip(*found, expected, strict=True):
        assert torch.equal(once, again)
        torch.testing.assert_close(once, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("optimizer", ["adamw", "nesterov", "muon"])
def test_without_a_delay_nothing_changes(name: CorrectionName, optimizer: str) -> None:
    """Not one bit, with any of them."""
    found = []
    for correction in ("none", name):
        model = small_model()
        losses = hocket.emulate(
            hocket.Program.chain(range(2), 1),
            model,
            nn.functional.mse_loss,
            OPTIMIZERS[optimizer],
            small_data(6),
            cut_at=["2"],
            correction=correction,
        )
        found.append((losses, [p.detach() for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


@pytest.mark.parametrize("name", NAMES[1:])
def test_with_a_delay_something_does(name: CorrectionName) -> None:
    """Of the delayed stage, and from there of all."""
    found = []
    for correction in ("none", name):
        model = small_model()
        hocket.emulate(
            hocket.Program.chain(range(2), 1, delays=[1, 0]),
            model,
            nn.functional.mse_loss,
            descent(LR, MOMENTUM),
            small_data(6),
            cut_at=["2"],
            correction=correction,
        )
        found.append([p.detach() for p in model.parameters()])
    assert not any(map(torch.equal, *found))


def updated(updater: Updater, seeds: range) -> list[Tensor]:
    """The weights, and what is predicted, after updates with random gradients."""
    for seed in seeds:
        torch.manual_seed(seed)
        for p in updater.parameters.values():
            p.grad = torch.randn_like(p)
        updater.update()
    weights = [p.detach() for p in updater.parameters.values()]
    return [*weights, *(updater.predicted() or {}).values()]


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("optimizer", ["adamw", "nesterov", "muon"])
@pytest.mark.parametrize("num_before", [1, 5])
def test_it_goes_on_from_a_saved_state(
    name: CorrectionName, optimizer: str, num_before: int
) -> None:
    """Bit for bit, by way of what a checkpoint can hold."""
    settings = TrainingConfig(optimizer=OPTIMIZERS[optimizer], correction=name)
    model, other = small_model(), small_model()
    straight = Updater(dict(model.named_parameters()), settings, delay=2)
    updated(straight, range(num_before))
    resumed = Updater(dict(other.named_parameters()), settings, delay=2)
    assert straight.correction is not None
    assert resumed.correction is not None
    assert straight.optimizer is not None
    assert resumed.optimizer is not None
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(straight.correction.state_dict(), "#0", tensors))
    tensors = {key: x.clone() for key, x in tensors.items()}
    other.load_state_dict(model.state_dict())
    resumed.optimizer.load_state_dict(copy.deepcopy(straight.optimizer.state_dict()))
    state = decode(json.loads(text), lambda x, _: tensors[x])
    resumed.correction.load_state_dict(state)
    seeds = range(num_before, num_before + 4)
    assert all(map(torch.equal, updated(straight, seeds), updated(resumed, seeds)))


def test_an_unknown_word_is_refused() -> None:
    """With those that there are; before anything else is looked at."""
    said = (
        "correction is 'magic': it may be none, error-feedback, weight-prediction, "
        "lr-discount"
    )
    unknown: Any = "magic"
    with pytest.raises(ConfigError, match=said):
        TrainingConfig(optimizer=descent(LR), correction=unknown)
    with pytest.raises(ConfigError, match=said):
        hocket.emulate(
            hocket.Program.chain([0], 1, delays=[1]),
            small_model(),
            nn.functional.mse_loss,
            descent(LR),
            small_data(1),
            correction=unknown,
        )


def test_workers_compare_the_word() -> None:
    """Each sends the others what it got."""
    texts = {
        TrainingConfig(optimizer=descent(LR), correction=name).text for name in NAMES
    }
    discounts = {
        TrainingConfig(
            optimizer=descent(LR), correction="lr-discount", num_discounted_updates=n
        ).text
        for n in (5, 6)
    }
    assert len(texts | discounts) == len(NAMES) + 2
