"""What every transport promises of the way: order, room, and ends."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.errors import WaitError
from hocket.run.comm.schema import Schema, message_tag
from hocket.run.comm.transport import Channel
from tests.run.support.transport_pair import (
    SCHEMA,
    SHARED,
    STAGED,
    Settings,
    Worker,
    content,
    each_kind,
    run_both,
    run_pair,
    same,
    tags_of,
)

pytestmark = [
    pytest.mark.timeout(110),
    each_kind,
]

NUM_MESSAGES = 40


def exchange(worker: Worker) -> bool:
    """Send and receive in turn, many times."""
    sender, receiver = worker.ends
    tags = tags_of(SCHEMA, NUM_MESSAGES)
    receiver.expect(tags, SCHEMA)
    right = True
    for number, tag in enumerate(tags):
        sender.send(tag, content(worker.rank, number), SCHEMA)
        right &= same(receiver.receive(tag), content(1 - worker.rank, number))
        receiver.release(tag)
    sender.flush(5.0)
    worker.meet("end")
    return right


def test_messages_arrive_whole_and_in_order(kind: str, tmp_path: Path) -> None:
    """In both directions at once, many times around the ring of buffers."""
    assert run_both(tmp_path, Settings(kind), exchange) == [True, True]


def backwards(worker: Worker) -> bool:
    """Rank 1 receives in an order of its own."""
    sender, receiver = worker.ends
    tags = tags_of(SCHEMA, 12)
    if worker.rank == 0:
        for number, tag in enumerate(tags):
            sender.send(tag, content(0, number), SCHEMA)
        sender.flush(10.0)
        worker.meet("end")
        return True
    receiver.expect(tags, SCHEMA)
    right = True
    for number in (3, 1, 2, 0, 11, 4, 10, 9, 5, 6, 8, 7):
        right &= same(receiver.receive(tags[number]), content(0, number))
    worker.meet("end")
    return right


def test_messages_are_received_in_any_order(kind: str, tmp_path: Path) -> None:
    """Also farther apart than there are buffers, and while all of them are held."""
    assert run_both(tmp_path, Settings(kind, num_buffers=3), backwards) == [True, True]


def run_ahead(worker: Worker) -> Any:
    """Rank 0 sends until it is held back; rank 1 receives nothing."""
    sender, receiver = worker.ends
    tags = tags_of(SCHEMA, 20)
    if worker.rank == 1:
        worker.meet("begin")
        worker.meet("end")
        receiver.close()
        return None
    worker.meet("begin")
    num_sent = 0
    try:
        for number, tag in enumerate(tags):
            sender.send(tag, content(0, number), SCHEMA)
            num_sent += 1
    except WaitError as error:
        return num_sent, str(error), worker.waits
    finally:
        worker.meet("end")


@pytest.mark.parametrize("num_buffers", [1, 4])
def test_a_sender_is_held_back(kind: str, tmp_path: Path, num_buffers: int) -> None:
    """It is `num_buffers` messages ahead at most, and waits until its deadline only."""
    settings = Settings(kind, timeout_s=0.5, num_buffers=num_buffers)
    num_sent, error, waits = run_both(tmp_path, settings, run_ahead)[0]

    assert num_sent == num_buffers * (2 if kind == STAGED else 1)
    assert "F0>1 (rank 0 to rank 1), step 0, microbatch" in error
    assert "waited 0.5 s" in error
    assert waits[-1] == ("F0>1", 1)


def see_arrival(worker: Worker) -> Any:
    """Rank 1 asks before and after the message comes."""
    sender, receiver = worker.ends
    (tag,) = tags_of(SCHEMA, 1)
    if worker.rank == 0:
        worker.meet("before")
        sender.send(tag, content(0, 0), SCHEMA)
        worker.meet("sent")
        sender.flush(10.0)
        worker.meet("end")
        return None
    receiver.expect([tag], SCHEMA)
    before = receiver.ready(tag)
    worker.meet("before")
    worker.meet("sent")
    after = receiver.ready(tag)
    receiver.receive(tag)
    worker.meet("end")
    return before, after


def test_ready_is_true_only_for_what_has_come(kind: str, tmp_path: Path) -> None:
    """gloo does not know, and says False."""
    _, (before, after) = run_both(tmp_path, Settings(kind), see_arrival)

    assert not before
    if kind != STAGED:  # there it may be on its way to the host
        assert after == (kind == SHARED)


def leave_at_once(worker: Worker) -> Any:
    """Rank 0 ends long before rank 1 receives."""
    sender, receiver = worker.ends
    tags = tags_of(SCHEMA, 3)
    if worker.rank == 0:
        for number, tag in enumerate(tags):
            sender.send(tag, content(0, number), SCHEMA)
        sender.flush(10.0)
        return None
    receiver.expect(tags, SCHEMA)
    time.sleep(0.5)
    return [
        same(receiver.receive(tag), content(0, number))
        for number, tag in enumerate(tags)
    ]


def test_a_sender_may_end_after_flush(kind: str, tmp_path: Path) -> None:
    """What it sent arrives all the same."""
    _, right = run_both(tmp_path, Settings(kind), leave_at_once)

    assert right == [True] * 3


def count_while_waiting(worker: Worker) -> int:
    """Count on another thread while this one waits."""
    sender, receiver = worker.ends
    (tag,) = tags_of(SCHEMA, 1)
    if worker.rank == 0:
        worker.meet("begin")
        time.sleep(0.5)
        sender.send(tag, content(0, 0), SCHEMA)
        sender.flush(10.0)
        worker.meet("end")
        return 0
    receiver.expect([tag], SCHEMA)
    worker.meet("begin")
    count = 0
    done = threading.Event()

    def tick() -> None:
        nonlocal count
        while not done.wait(0.01):
            count += 1

    thread = threading.Thread(target=tick)
    thread.start()
    receiver.receive(tag)
    done.set()
    thread.join()
    worker.meet("end")
    return count


def test_other_threads_run_during_a_wait(kind: str, tmp_path: Path) -> None:
    """A wait holds no lock that Python's other threads need."""
    _, count = run_both(tmp_path, Settings(kind), count_while_waiting)

    assert count > 10


def several_channels(worker: Worker) -> bool:
    """Three channels in one direction, their ends made in another order."""
    transport = worker.transport
    schema = Schema.parse("int64[1]")
    there = [Channel(f"F{n}>{n + 1}", 0, 1) for n in (2, 4, 6)]
    tags = tags_of(schema, 3)
    if worker.rank == 0:
        senders = [transport.sender(channel) for channel in there]
        for tag in tags:
            for number, sender in enumerate(senders):
                sender.send(tag, [torch.tensor([number])], schema)
        for sender in senders:
            sender.flush(10.0)
        worker.meet("end")
        return True
    receivers = [transport.receiver(channel) for channel in reversed(there)]
    for receiver in receivers:
        receiver.expect(tags, schema)
    right = all(
        receiver.receive(tag)[0].item() == len(there) - 1 - number
        for tag in tags
        for number, receiver in enumerate(receivers)
    )
    worker.meet("end")
    return right


def test_channels_do_not_mix(kind: str, tmp_path: Path) -> None:
    """Two ranks may have many channels in one direction, with equal tags on them."""
    assert run_both(tmp_path, Settings(kind), several_channels) == [True, True]


def never_begin(worker: Worker) -> None:
    """Send nothing."""
    worker.meet("end")


def wait_in_vain(worker: Worker) -> None:
    """Expect what is never sent."""
    _, receiver = worker.ends
    tag = message_tag(SCHEMA, 3, 1)
    try:
        receiver.expect([tag], SCHEMA)
        receiver.receive(tag)
    finally:
        worker.meet("end")


def test_a_sender_that_never_begins_ends_the_wait(kind: str, tmp_path: Path) -> None:
    """Within the timeout, naming the channel and both ranks."""
    settings = Settings(kind, timeout_s=0.5)
    outcome, _ = run_pair(tmp_path, settings, wait_in_vain, never_begin)

    assert outcome.kind == "WaitError"
    assert "B1>0 (rank 1 to rank 0)" in outcome.error
    assert "waited 0.5 s" in outcome.error
    assert 0.5 <= outcome.wall_s < 10.0
