"""Messages that are posted in a planned order: the wires, deadlines and the end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.errors import WaitError
from hocket.run.comm.dist.ordered import OrderedTransport
from hocket.run.comm.dist.pair_wires import WireMessage
from hocket.run.comm.step_header import HEADER
from hocket.run.comm.transport import Carries, Channel, Post, Receiver, Sender
from tests.run.support.strict_wires import Passed, StrictWires
from tests.run.support.transport_pair import (
    SCHEMA,
    TORCH,
    Settings,
    Worker,
    content,
    run_both,
    run_pair,
    same,
    tags_of,
)

THERE = Channel("F0>1", 0, 1, Carries.PLANNED)
BACK = Channel("B1>0", 1, 0, Carries.PLANNED)


class NeverSent(Passed):
    """A message whose other end is gone; the device has come to it."""

    def is_completed(self) -> bool:
        """Not before it is aborted."""
        return False


class DeadWires(StrictWires):
    """Wires whose peer never posts anything."""

    was_aborted = False

    def post(self, peer: int, transfers: Sequence[WireMessage]) -> Passed:
        """See `PairWires.post`."""
        return NeverSent()

    def abort(self) -> None:
        """See `PairWires.abort`."""
        self.was_aborted = True


@contextmanager
def ordered(
    worker: Worker, wires: StrictWires, timeout_s: float = 20.0
) -> Iterator[tuple[OrderedTransport, Sender, Receiver]]:
    """A transport between both workers, and this one's ends."""
    transport = OrderedTransport(
        worker.transport,
        wires,
        device=torch.device("cpu"),
        timeout_s=timeout_s,
        on_wait=lambda name, rank: worker.waits.append((name, rank)),
    )
    out, back = (THERE, BACK) if worker.rank == 0 else (BACK, THERE)
    with closing(transport):
        yield transport, transport.sender(out), transport.receiver(back)


def strict(worker: Worker) -> StrictWires:
    """Wires between both workers."""
    return StrictWires([(0, 1)], worker.rank, 20.0)


def planned(*groups: Sequence[Sender | Receiver]) -> list[list[Post]]:
    """An order in which all schemas are known."""
    return [[Post(end, lambda: None) for end in group] for group in groups]


def cross(worker: Worker) -> list[Any]:
    """Both send first; headers go before, and results are not planned."""
    first, second = tags_of(SCHEMA, 2)
    wires, peer = strict(worker), 1 - worker.rank
    with ordered(worker, wires) as (transport, sender, receiver):
        transport.plan(planned((sender, receiver), (sender, receiver)))
        receiver.expect([7], HEADER)
        receiver.expect([first, second], SCHEMA)
        sender.send(7, (torch.tensor([1, 2, worker.rank, 0]),), HEADER)
        sender.send(first, content(worker.rank, 0), SCHEMA)
        assert receiver.receive(7)[0].tolist() == [1, 2, peer, 0]
        receiver.release(7)
        assert same(receiver.receive(first), content(peer, 0))
        sender.send(second, content(worker.rank, 1), SCHEMA)
        receiver.release(first)
        assert same(receiver.receive(second), content(peer, 1))
        receiver.release(second)
        sender.flush(10.0)
        worker.meet("received")
    return [wires.num_messages[2], wires.is_closed_cleanly]


@pytest.mark.timeout(110)
def test_messages_that_cross_are_posted_together(tmp_path: Path) -> None:
    """Two sends that wait for each other's receive would wait for ever."""
    assert run_both(tmp_path, Settings(TORCH), cross) == [[4, True]] * 2


def receive_early(worker: Worker) -> list[str]:
    """Rank 1 posts its receive before its send, and asks for it later."""
    (tag,) = tags_of(SCHEMA, 1)
    order: list[str] = []
    wires, peer = strict(worker), 1 - worker.rank
    with ordered(worker, wires) as (transport, sender, receiver):
        ends: list[Sender | Receiver]
        ends = [sender, receiver] if worker.rank == 0 else [receiver, sender]
        agree = partial(receiver.expect, [tag], SCHEMA)
        groups = [
            [Post(end, partial(order.append, "sender's") if end is sender else agree)]
            for end in ends
        ]
        transport.plan(groups)
        sender.send(tag, content(worker.rank, 0), SCHEMA)
        assert same(receiver.receive(tag), content(peer, 0))
        receiver.release(tag)
        worker.meet("received")
    return order


@pytest.mark.timeout(110)
def test_a_receive_before_a_send_is_posted_with_it(tmp_path: Path) -> None:
    """Only the receive makes its rank look up a schema, when it is posted."""
    assert run_both(tmp_path, Settings(TORCH), receive_early) == [[], []]


def send_twice(worker: Worker) -> None:
    """Rank 0 sends two messages; what rank 1 planned is another order."""
    (tag,) = tags_of(SCHEMA, 1)
    with ordered(worker, strict(worker)) as (transport, sender, receiver):
        ends = (sender, sender) if worker.rank == 0 else (sender, receiver)
        transport.plan(planned(*((end,) for end in ends)))
        receiver.expect([tag], SCHEMA)
        sender.send(tag, content(worker.rank, 0), SCHEMA)


@pytest.mark.timeout(110)
def test_another_order_at_the_other_end_is_an_error(tmp_path: Path) -> None:
    """What the wires of these tests are for: gloo would deliver both."""
    outcomes = run_pair(tmp_path, Settings(TORCH), send_twice, send_twice)

    for rank, outcome in enumerate(outcomes):
        assert outcome.kind == "AssertionError"
        assert f"rank {rank} posts" in outcome.error
        assert "as number 0" in outcome.error


def wait_for_the_dead(worker: Worker) -> list[Any]:
    """Go on after a receive that will not end; what is raised, and done, later."""
    first, second = tags_of(SCHEMA, 2, step=3)
    wires = DeadWires([(0, 1)], worker.rank, 20.0)
    with ordered(worker, wires, timeout_s=1.0) as (transport, sender, receiver):
        transport.plan(planned((receiver,), (receiver,)))
        receiver.expect([first, second], SCHEMA)
        begin_s = time.monotonic()
        receiver.receive(first)
        blocked_s = time.monotonic() - begin_s
        until_s = begin_s + 20.0
        while not wires.was_aborted and time.monotonic() < until_s:
            time.sleep(0.01)
        with pytest.raises(WaitError) as caught:
            receiver.receive(second)
        with pytest.raises(WaitError):
            sender.send(first, content(0, 0), SCHEMA)
    name = (THERE, BACK)[1 - worker.rank].name
    assert (name, 1 - worker.rank) in worker.waits
    return [blocked_s < 1.0, str(caught.value), wires.is_closed_cleanly]


@pytest.mark.timeout(110)
def test_a_peer_that_is_gone_is_an_error_of_the_next_call(tmp_path: Path) -> None:
    """The device's wait has a deadline; then all is aborted, and not destroyed."""
    answers = run_both(tmp_path, Settings(TORCH), wait_for_the_dead)

    for rank, (goes_on, error, is_clean) in enumerate(answers):
        assert goes_on
        assert f"step 3, microbatch 0, with rank {1 - rank}" in error
        assert "the device waited 1.0 s" in error
        assert not is_clean


def leave_a_plan(worker: Worker) -> bool:
    """Close with a place in the order that no message came to."""
    wires = strict(worker)
    with ordered(worker, wires) as (transport, sender, _):
        transport.plan(planned((sender,)))
    return wires.is_closed_cleanly


@pytest.mark.timeout(110)
def test_what_ends_early_is_aborted(tmp_path: Path) -> None:
    """The peer may be gone: NCCL would finalise together with it."""
    assert run_both(tmp_path, Settings(TORCH), leave_a_plan) == [False, False]
