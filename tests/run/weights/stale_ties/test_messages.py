"""The owner and a replica of a stale tied weight exchange values and gradients."""

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
from hocket.run.weights.stale_ties.ends import TieOwner, TieReplica
from tests.run.support.transport_pair import (
    SHARED,
    Settings,
    Worker,
    each_kind,
    run_pair,
    run_survivor,
)

pytestmark = pytest.mark.timeout(110)

NUM_STEPS: Final = 6
SIZE_BYTES: Final = 6 * 4


class Weight(nn.Module):
    """A module whose only weight begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))


def make_owner(worker: Worker, delay: int) -> tuple[Weight, WeightVersions, TieOwner]:
    """Make rank 0's end: it owns the weight, and updates it."""
    module = Weight()
    versions = WeightVersions(module, delay)
    sender, receiver = worker.ends
    owner = TieOwner("weight", module.weight, versions, [receiver], [sender])
    return module, versions, owner


def make_replica(worker: Worker, delay: int) -> tuple[nn.Parameter, TieReplica]:
    """Make rank 1's end: it reads the weight, and sends its gradients to the owner."""
    parameter = Weight().weight
    ends = worker.ends
    return parameter, TieReplica("weight", delay, parameter, *ends)


def update_and_send(worker: Worker, *, delay: int) -> list[Any]:
    """Add 1 in each update; return the gradient that each update had."""
    module, versions, owner = make_owner(worker, delay)
    found: list[Any] = []
    for step in range(NUM_STEPS):
        owner.expect(step)
        owner.expect(step)  # with each backward
        if step % 2:
            module.weight.grad = torch.full((2, 3), 10.0)
        owner.gather(step)
        grad = module.weight.grad
        found.append(None if grad is None else grad.unique().tolist())
        module.weight.grad = None
        versions.complete(step)
        versions.before_update()
        module.weight.data += 1.0
        versions.after_update()
        owner.send_values()
    return found


def read_and_send(worker: Worker, *, delay: int) -> list[Any]:
    """Read in each step, begun before the last one ends, and send a gradient.

    Returns:
        What each step read, the newest weight, and the bytes of the older versions.
    """
    parameter, replica = make_replica(worker, delay)
    found: list[Any] = []
    for step in range(NUM_STEPS):
        if delay or not step:
            replica.read(step)
        if step + 1 < NUM_STEPS and delay:
            replica.read(step + 1)
        leaf = replica.read(step)
        found.append(leaf.unique().tolist())
        if step != 2:
            leaf.grad = torch.full((2, 3), step + 1.0)
        replica.send_gradient(step)
    replica.receive_pending()
    return [found, parameter.unique().tolist(), replica.num_bytes]


@each_kind
@pytest.mark.parametrize("delay", [1, 3])
def test_each_step_reads_its_version_and_has_its_gradient(
    kind: str, delay: int, tmp_path: Path
) -> None:
    """Two steps of one version may be under way, and a step may have no gradient."""
    there, here = run_pair(
        tmp_path,
        Settings(kind),
        partial(update_and_send, delay=delay),
        partial(read_and_send, delay=delay),
    )
    assert (there.error, here.error) == ("", "")
    read, newest, num_bytes = here.value
    assert read == [[max(0.0, t - delay)] for t in range(NUM_STEPS)]
    assert newest == [NUM_STEPS]
    assert num_bytes == delay * SIZE_BYTES
    assert there.value == [[1.0], [12.0], None, [14.0], [5.0], [16.0]]


def wait_for_gradient(worker: Worker) -> None:
    """As the owner, wait for a gradient that never comes."""
    _, _, owner = make_owner(worker, 1)
    owner.expect(0)
    worker.meet("ready")
    owner.gather(0)


def wait_for_values(worker: Worker) -> None:
    """As a replica, wait for values that never come."""
    _, replica = make_replica(worker, 1)
    replica.read(0).grad = torch.ones(2, 3)
    replica.send_gradient(0)
    worker.meet("ready")
    replica.read(2)


def die(worker: Worker) -> None:
    """Meet the other rank, and be killed while it waits."""
    worker.meet("ready")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("waiting", [wait_for_gradient, wait_for_values])
def test_a_wait_for_a_killed_rank_ends(waiting: Any, tmp_path: Path) -> None:
    """The rank that waits raises a WaitError that names the killed one, in time."""
    survivor = run_survivor(tmp_path, Settings(SHARED, timeout_s=3.0), waiting, die)
    assert survivor.kind == "WaitError"
    assert "rank 1" in survivor.error
