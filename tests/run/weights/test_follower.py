"""Updates of nets that follow another one: momentum, copies, buffers, skipped steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import hocket
from hocket.errors import ConfigError
from hocket.run.weights.follower import Follower, Pairs
from hocket.run.weights.momentum import FollowerUpdate


def test_the_momentum_rises_along_byols_cosine() -> None:
    """`1 - (1 - base) * (cos(pi k / K) + 1) / 2` (section 3.3), and 1 from K on."""
    base, num_steps = 0.996, 300
    found = hocket.Momentum(base, final=1.0, num_steps=num_steps)
    for k in range(num_steps):
        expected = 1.0 - (1.0 - base) * (math.cos(math.pi * k / num_steps) + 1.0) / 2.0
        assert found.at(k) == pytest.approx(expected, rel=1e-15)
    assert found.at(0) == base
    assert [found.at(k) for k in (num_steps, num_steps + 1, 10**9)] == [1.0] * 3


def test_a_momentum_may_fall_to_its_final_value() -> None:
    """Half-way it is the mean of both."""
    found = hocket.Momentum(0.9, final=0.5, num_steps=10)
    assert found.at(5) == pytest.approx(0.7)
    assert found.at(10) == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"value": 1.5}, "the momentum is 1.5: it must be from 0"),
        ({"value": 0.9, "final": -0.1, "num_steps": 3}, "the final momentum is -0.1"),
        ({"value": math.nan}, "the momentum is nan"),
        ({"value": 0.9, "final": 1.0}, "num_steps is None: give both"),
        ({"value": 0.9, "num_steps": 3}, "final is None and num_steps is 3"),
        ({"value": 0.9, "final": 1.0, "num_steps": 0}, "num_steps is 0: give at"),
        (
            {"value": lambda step: 0.9, "final": 1.0, "num_steps": 3},
            "a function of the step, and final is 1.0",
        ),
        ({"value": 0.9, "buffers": "copy"}, "give one of own, copied, averaged"),
    ],
)
def test_momenta_that_make_no_sense_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    """Where they are written, not steps later."""
    with pytest.raises(ConfigError, match=message):
        hocket.Momentum(**arguments)


def test_a_function_is_judged_at_its_step() -> None:
    """It may be wrong at one step only; the error names it."""
    momentum = hocket.Momentum(lambda step: 0.9 + 0.06 * step)
    assert momentum.at(1) == pytest.approx(0.96)
    with pytest.raises(ConfigError, match=r"the momentum of step 2 is 1\.02"):
        momentum.at(2)


def test_workers_compare_what_may_differ() -> None:
    """Of a function they compare values: its address differs from worker to worker."""
    texts = {
        hocket.Momentum(0.9, final=1.0, num_steps=10).text,
        hocket.Momentum(0.9, final=1.0, num_steps=11).text,
        hocket.Momentum(0.9, final=1.0, num_steps=10, buffers="copied").text,
        hocket.Momentum(lambda step: 0.9).text,
        hocket.Momentum(lambda step: 0.8).text,
        hocket.CopyEvery(3).text,
    }
    assert len(texts) == 6
    assert hocket.Momentum(lambda step: 0.9).text == "0.9 " * 8 + "own"


def test_copies_need_a_distance() -> None:
    """Of at least one update."""
    with pytest.raises(ConfigError, match="num_steps is 0"):
        hocket.CopyEvery(0)


def pairs(**tensors: tuple[Tensor, Tensor]) -> Pairs:
    """Pair own tensors with followed ones, which are stage 1's."""
    return Pairs(
        {name: own for name, (own, _) in tensors.items()},
        {name: followed for name, (_, followed) in tensors.items()},
        dict.fromkeys(tensors, frozenset({1})),
    )


def test_a_move_is_bit_equal_to_the_formula() -> None:
    """`m * own + (1 - m) * followed`, as a loop over the parameters rounds it."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        own, followed = torch.randn(2, 1000, dtype=dtype).unbind()
        expected = own.clone().mul_(0.99).add_(followed, alpha=1.0 - 0.99)
        weights = pairs(a=(own, followed), b=(own.clone(), followed))
        Follower(hocket.Momentum(0.99), weights).update(0)
        assert torch.equal(weights.own["a"], expected)
        assert torch.equal(weights.own["b"], expected)


def test_a_move_reads_weights_from_before_their_next_update() -> None:
    """The copy is made at the first update of any stage that holds a tied weight."""
    own, followed = torch.zeros(1), torch.ones(1)
    weights = Pairs({"w": own}, {"w": followed}, {"w": frozenset({1, 2})})
    follower = Follower(hocket.Momentum(0.5), weights)
    follower.before_update_of(7, 3)  # another net's, of a later step
    follower.before_update_of(1, 0)
    follower.before_update_of(1, 1)
    followed.fill_(9.0)
    follower.before_update_of(2, 1)
    follower.update(0)
    assert own.item() == 0.5
    follower.update(1)
    assert own.item() == 4.75


def test_a_hard_target_network_is_copied_every_third_update() -> None:
    """Behind updates 2, 5, ...; between them it stays, bit for bit."""
    own, followed = torch.zeros(2), torch.zeros(2)
    follower = Follower(hocket.CopyEvery(3), pairs(w=(own, followed)))
    found = []
    for step in range(7):
        followed.fill_(step + 1.0)
        follower.update(step)
        found.append(own[0].item())
    assert found == [0.0, 0.0, 3.0, 3.0, 3.0, 6.0, 6.0]


@pytest.mark.parametrize(
    ("update", "mean", "count"),
    [
        (hocket.Momentum(0.75), 1.0, 1),
        (hocket.Momentum(0.75, buffers="copied"), 5.0, 9),
        (hocket.Momentum(0.75, buffers="averaged"), 2.0, 9),
        (hocket.Momentum(1.0, buffers="copied"), 1.0, 1),
        (hocket.CopyEvery(1, buffers="averaged"), 5.0, 9),
        (hocket.CopyEvery(2, buffers="copied"), 1.0, 1),
    ],
)
def test_buffers_move_by_their_rule(
    update: FollowerUpdate, mean: float, count: int
) -> None:
    """A mean of 1 and a count of 1 follow 5 and 9; a momentum of 1 moves nothing."""
    own, own_count = torch.tensor([1.0]), torch.tensor(1)
    buffers = pairs(mean=(own, torch.tensor([5.0])), count=(own_count, torch.tensor(9)))
    moved = Pairs() if update.buffers == "own" else buffers
    Follower(update, Pairs(), moved).update(0)
    assert (own.item(), own_count.item()) == (mean, count)


def test_buffers_are_read_as_they_were_behind_the_steps_forwards() -> None:
    """A forward of the next step may come before the follower's update."""
    own, followed = torch.zeros(1), torch.ones(1)
    buffers = pairs(mean=(own, followed))
    follower = Follower(hocket.Momentum(0.5, buffers="copied"), Pairs(), buffers)
    assert follower.buffers.stages == {1}
    follower.after_forwards_of(1, 0)
    followed.fill_(2.0)  # a forward of step 1
    follower.update(0)
    assert own.item() == 1.0


def test_a_skipped_step_moves_no_average() -> None:
    """As no optimizer does; the step counts, and a hard copy behind it is made."""
    own, followed = torch.zeros(1), torch.ones(1)
    copied = torch.zeros(1)
    weights = pairs(w=(own, followed))
    average = Follower(hocket.Momentum(lambda step: 0.5 / (step + 1)), weights)
    copying = Follower(hocket.CopyEvery(2), pairs(w=(copied, followed)))
    for follower in (average, copying):
        for step in range(2):
            follower.before_update_of(1, step, skips=step == 1)
            follower.update(step)
    assert own.item() == 0.5
    assert copied.item() == 1.0
    average.before_update_of(1, 2)
    average.update(2)
    assert own.item() == pytest.approx(0.5 / 6 + (1 - 1 / 6))


def test_a_skipped_step_of_another_net_skips_nothing() -> None:
    """The follower looks at the stages that it follows."""
    own, followed = torch.zeros(1), torch.ones(1)
    follower = Follower(hocket.Momentum(0.5), pairs(w=(own, followed)))
    follower.before_update_of(7, 0, skips=True)
    follower.update(0)
    assert own.item() == 0.5
