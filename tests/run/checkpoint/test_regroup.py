"""Optimizer groups and schedules follow their parameters into another cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.errors import CheckpointError
from hocket.run.checkpoint.format.manifest import (
    ParameterGroup,
    UpdateRecord,
    WorkerPart,
)
from hocket.run.checkpoint.regroup import SavedUpdates
from hocket.run.cluster.store.values import encode

NAMES = {name: name for name in "abcd"}


def updates(*groups: tuple[str, float], scheduler: Any = None) -> UpdateRecord:
    """A stage with groups of parameters (a letter each) and their learning rates."""
    states = {name: {"seen": name} for letters, _ in groups for name in letters}
    made = tuple(ParameterGroup({"lr": lr}, tuple(letters)) for letters, lr in groups)
    return UpdateRecord("SGD", made, states, "S", scheduler)


def saved(*stages: UpdateRecord) -> SavedUpdates:
    """A checkpoint of such stages."""
    parts = [WorkerPart(rank, 0, (), (stage,)) for rank, stage in enumerate(stages)]
    return SavedUpdates(parts, NAMES)


def test_groups_are_made_of_what_their_parameters_had() -> None:
    """Two stages into one, and one into two."""
    two = saved(updates(("a", 0.1), ("b", 0.2)), updates(("c", 0.1), ("d", 0.2)))
    found = two.regrouped([["a", "c"], ["b", "d"]], "SGD", "S")
    assert [options["lr"] for options in found.options] == [0.1, 0.2]
    assert found.states == {name: {"seen": name} for name in "acbd"}

    one = saved(updates(("ac", 0.1), ("bd", 0.2)))
    found = one.regrouped([["c"], ["d"]], "SGD", "S")
    assert [options["lr"] for options in found.options] == [0.1, 0.2]
    assert found.states.keys() == {"c", "d"}


def test_groups_that_do_not_fit_are_refused() -> None:
    """The two parameters and the option are named."""
    two = saved(updates(("a", 0.1), ("b", 0.2)))
    with pytest.raises(CheckpointError, match=r"a and b .*\(lr: 0.1 and 0.2\)"):
        two.regrouped([["a", "b"]], "SGD", "S")
    with pytest.raises(CheckpointError, match="c wants a gradient"):
        saved(updates(("ab", 0.1))).regrouped([["a", "c"]], "SGD", "S")
    with pytest.raises(CheckpointError, match=r"saved with SGD and S .* into Adam"):
        saved(updates(("ab", 0.1))).regrouped([["a", "b"]], "Adam", "S")


def scheduler_of(*lrs: float) -> torch.optim.lr_scheduler.LRScheduler:
    """After three updates of an optimizer with such groups."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": x} for x in lrs]
    optimizer = torch.optim.SGD(groups)
    schedule = torch.optim.lr_scheduler
    parts = [
        schedule.LinearLR(optimizer, 0.1, total_iters=2),
        schedule.CosineAnnealingLR(optimizer, 10),
    ]
    scheduler = schedule.SequentialLR(optimizer, parts, milestones=[2])
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    return scheduler


def state_of(*lrs: float) -> Any:
    """The state of such a schedule as JSON."""
    return encode(scheduler_of(*lrs).state_dict(), "x", {})


def test_a_schedule_is_what_it_would_be_in_the_other_cut() -> None:
    """Numbers per group follow the groups, all others are the same everywhere.

    Stage 0 has both groups, stage 1 only the second; and the other way round.
    """
    both = updates(("a", 0.1), ("b", 0.2), scheduler=state_of(0.1, 0.2))
    second = updates(("c", 0.2), scheduler=state_of(0.2))
    two = saved(both, second)
    found = two.regrouped([["a"], ["b", "c"]], "SGD", "S")
    assert found.scheduler == state_of(0.1, 0.2)
    assert two.regrouped([["b", "c"]], "SGD", "S").scheduler == state_of(0.2)
    assert two.regrouped([["c"], ["a"]], "SGD", "S").scheduler == state_of(0.2, 0.1)
    assert two.regrouped([[], ["c"]], "SGD", "S").scheduler == state_of(0.2, 0.2)


def test_schedules_that_went_apart_are_refused() -> None:
    """They cannot become one."""
    a, b = ({"last_epoch": i, "base_lrs": [0.1]} for i in (1, 2))
    two = saved(updates(("a", 0.1), scheduler=a), updates(("b", 0.1), scheduler=b))
    with pytest.raises(CheckpointError, match=r"differ in last_epoch \(1 and 2\)"):
        two.regrouped([["a"], ["b"]], "SGD", "S")
