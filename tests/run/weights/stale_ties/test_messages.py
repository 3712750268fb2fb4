"""A weight between two processes: which version is read, and what comes back."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

from hocket.run.stage.versions import WeightVersions
from hocket.run.weights.stale_ties.owner import TieOwner
from hocket.run.weights.stale_ties.replica import TieReplica
from tests.run.support.transport_pair import (
    KINDS,
    SHARED,
    Settings,
    Worker,
    run_pair,
    run_survivor,
)

pytestmark = pytest.mark.timeout(110)

NUM_STEPS: Final = 6
SIZE_BYTES: Final = 6 * 4


class Weight(nn.Module):
    """Of the value 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))


def lent_by(worker: Worker, delay: int) -> tuple[Weight, WeightVersions, TieOwner]:
    """Rank 0's."""
    module = Weight()
    versions = WeightVersions(module, delay)
    sender, receiver = worker.ends
    lent = TieOwner(
        "weight", module.weight, versions, [receiver], [sender], predicts=False
    )
    return module, versions, lent


def borrowed_by(worker: Worker, delay: int) -> tuple[nn.Parameter, TieReplica]:
    """Rank 1's."""
    parameter = Weight().weight
    ends = worker.ends
    return parameter, TieReplica("weight", delay, parameter, *ends, predicts=False)


def send_values(worker: Worker, *, delay: int) -> list[Any]:
    """Each update adds 1; the gradients that there were then."""
    module, versions, lent = lent_by(worker, delay)
    found: list[Any] = []
    for step in range(NUM_STEPS):
        lent.expect(step)
        lent.expect(step)  # with each backward
        if step % 2:
            module.weight.grad = torch.full((2, 3), 10.0)
        lent.gather(step)
        grad = module.weight.grad
        found.append(None if grad is None else grad.unique().tolist())
        module.weight.grad = None
        versions.complete(step)
        versions.before_update()
        module.weight.data += 1.0
        versions.after_update()
        lent.send_values()
    return found


def borrow(worker: Worker, *, delay: int) -> list[Any]:
    """What each step reads, begun before the last one ends; and what is kept."""
    parameter, borrowed = borrowed_by(worker, delay)
    found: list[Any] = []
    for step in range(NUM_STEPS):
        if delay or not step:
            borrowed.read(step)
        if step + 1 < NUM_STEPS and delay:
            borrowed.read(step + 1)
        leaf = borrowed.read(step)
        found.append(leaf.unique().tolist())
        if step != 2:
            leaf.grad = torch.full((2, 3), step + 1.0)
        borrowed.send_gradient(step)
    borrowed.receive_pending()
    return [found, parameter.unique().tolist(), borrowed.num_bytes]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delay", [1, 3])
def test_each_step_reads_its_version_and_has_its_gradient(
    kind: str, delay: int, tmp_path: Path
) -> None:
    """Also where two steps of one version are under way, or one has no gradient."""
    there, here = run_pair(
        tmp_path,
        Settings(kind),
        partial(send_values, delay=delay),
        partial(borrow, delay=delay),
    )
    assert (there.error, here.error) == ("", "")
    read, newest, num_bytes = here.value
    assert read == [[max(0.0, t - delay)] for t in range(NUM_STEPS)]
    assert newest == [NUM_STEPS]
    assert num_bytes == delay * SIZE_BYTES
    assert there.value == [[1.0], [12.0], None, [14.0], [5.0], [16.0]]


def gather_in_vain(worker: Worker) -> None:
    """Wait for a gradient that never comes."""
    _, _, lent = lent_by(worker, 1)
    lent.expect(0)
    worker.meet("ready")
    lent.gather(0)


def give_back_and_wait(worker: Worker) -> None:
    """Wait for values that never come."""
    _, borrowed = borrowed_by(worker, 1)
    borrowed.read(0).grad = torch.ones(2, 3)
    borrowed.send_gradient(0)
    worker.meet("ready")
    borrowed.read(2)


def die(worker: Worker) -> None:
    """Be killed while the other waits."""
    worker.meet("ready")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("waiting", [gather_in_vain, give_back_and_wait])
def test_who_waits_for_the_dead_ends(waiting: Any, tmp_path: Path) -> None:
    """In time, and says for whom."""
    survivor = run_survivor(tmp_path, Settings(SHARED, timeout_s=3.0), waiting, die)
    assert survivor.kind == "WaitError"
    assert "rank 1" in survivor.error
