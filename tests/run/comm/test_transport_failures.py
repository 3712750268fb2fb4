"""A worker that dies or hangs: the other ends in time, and says whom it waited for."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from hocket.errors import WaitError
from hocket.run.comm.schema import message_tag
from hocket.run.comm.shm.link import connect as connect_to
from hocket.run.comm.shm.packets import MessagePacket, pack
from hocket.run.comm.shm.sender import address_key
from tests.run.support.transport_pair import (
    BACK,
    SCHEMA,
    SHARED,
    Settings,
    Worker,
    content,
    each_kind,
    run_pair,
    run_survivor,
    seconds_after_fault,
)

pytestmark = pytest.mark.timeout(110)

LONG_S = 60.0  # a timeout that no test waits for
AT_ONCE_S = 20.0  # on a busy machine
NUM_STRANGERS = 40


def connect(worker: Worker) -> None:
    """Send a first message in both directions."""
    sender, receiver = worker.ends
    tag = message_tag(SCHEMA, 0, 0)
    receiver.expect([tag], SCHEMA)
    sender.send(tag, content(worker.rank, 0), SCHEMA)
    receiver.receive(tag)
    sender.flush(10.0)
    worker.meet("connected")


def wait_in_receive(worker: Worker) -> None:
    """Wait for a message that never comes."""
    connect(worker)
    _, receiver = worker.ends
    tag = message_tag(SCHEMA, 3, 1)
    receiver.expect([tag], SCHEMA)
    receiver.receive(tag)


def wait_in_send(worker: Worker) -> None:
    """Send until no worker receives."""
    connect(worker)
    sender, _ = worker.ends
    for microbatch in range(100):
        sender.send(message_tag(SCHEMA, 3, microbatch), content(0, 0), SCHEMA)


def flush_to_the_dead(worker: Worker) -> None:
    """Send a little, and find out at the end of the step that it was in vain."""
    connect(worker)
    sender, _ = worker.ends
    sender.send(message_tag(SCHEMA, 3, 1), content(0, 0), SCHEMA)
    while not worker.store.check(["fault"]):
        time.sleep(0.01)
    time.sleep(0.5)
    sender.flush(LONG_S)


def die(worker: Worker) -> None:
    """Be killed while the other waits."""
    connect(worker)
    time.sleep(0.3)
    worker.note_fault()
    os.kill(os.getpid(), signal.SIGKILL)


def stop(worker: Worker) -> None:
    """Be stopped, as by a debugger or in a frozen container."""
    connect(worker)
    worker.note_fault()
    os.kill(os.getpid(), signal.SIGSTOP)


def die_with_a_child(worker: Worker) -> None:
    """Be killed, and leave a child that holds the same sockets for a while."""
    connect(worker)
    if os.fork() == 0:
        time.sleep(AT_ONCE_S + 2.0)
        os._exit(0)
    time.sleep(0.3)
    worker.note_fault()
    os.kill(os.getpid(), signal.SIGKILL)


@each_kind
def test_a_receiver_learns_at_once_that_its_sender_was_killed(
    kind: str, tmp_path: Path
) -> None:
    """Long before the timeout; it names the message and the rank."""
    settings = Settings(kind, timeout_s=LONG_S)
    outcome = run_survivor(tmp_path, settings, wait_in_receive, die)

    assert outcome.kind == "WaitError"
    assert "B1>0 (rank 1 to rank 0), step 3, microbatch 1: rank 1 is gone" in (
        outcome.error
    )
    assert seconds_after_fault(tmp_path, outcome) < AT_ONCE_S


@each_kind
def test_a_sender_learns_at_once_that_its_receiver_was_killed(
    kind: str, tmp_path: Path
) -> None:
    """At the latest when it has filled all buffers."""
    settings = Settings(kind, timeout_s=LONG_S)
    outcome = run_survivor(tmp_path, settings, wait_in_send, die)

    assert outcome.kind == "WaitError"
    assert "F0>1 (rank 0 to rank 1), step 3, microbatch " in outcome.error
    assert "rank 1 is gone" in outcome.error
    assert seconds_after_fault(tmp_path, outcome) < AT_ONCE_S


@each_kind
def test_a_flush_finds_the_receiver_dead(kind: str, tmp_path: Path) -> None:
    """Also where there was room for everything sent."""
    settings = Settings(kind, timeout_s=LONG_S)
    outcome = run_survivor(tmp_path, settings, flush_to_the_dead, die)

    assert outcome.kind == "WaitError"
    assert "rank 1 is gone" in outcome.error
    assert seconds_after_fault(tmp_path, outcome) < AT_ONCE_S


@each_kind
@pytest.mark.parametrize("body", [wait_in_receive, wait_in_send])
def test_a_stopped_worker_is_waited_for_until_the_timeout(
    kind: str, tmp_path: Path, body: type
) -> None:
    """Then the error says for how long, for whom, and for which message."""
    outcome = run_survivor(tmp_path, Settings(kind, timeout_s=1.0), body, stop)

    assert outcome.kind == "WaitError"
    assert "step 3, microbatch " in outcome.error
    assert "waited 1.0 s" in outcome.error
    assert "rank 1" in outcome.error
    assert "stopped" in outcome.error
    assert seconds_after_fault(tmp_path, outcome) < 1.0 + AT_ONCE_S


def test_a_child_of_the_dead_does_not_hide_its_death(tmp_path: Path) -> None:
    """A data loader's processes outlive a killed worker, and hold its sockets open."""
    settings = Settings(SHARED, timeout_s=LONG_S)
    outcome = run_survivor(tmp_path, settings, wait_in_receive, die_with_a_child)

    assert outcome.kind == WaitError.__name__
    assert "rank 1 is gone" in outcome.error
    assert seconds_after_fault(tmp_path, outcome) < AT_ONCE_S


def receive_among_strangers(worker: Worker) -> list[tuple[float, ...]]:
    """Receive a message where another process has connected before the sender."""
    _, receiver = worker.ends
    name = worker.store.get(address_key(BACK)).decode().split()[1]
    strangers = []
    for i in range(NUM_STRANGERS):
        stranger = connect_to(name, 1.0)
        assert stranger is not None
        strangers.append(stranger)
        stranger.post(os.urandom(1 + 7 * i))
        stranger.post(pack(MessagePacket(message_tag(SCHEMA, 0, 0), i)))
    worker.meet("strangers")
    tag = message_tag(SCHEMA, 0, 0)
    receiver.expect([tag], SCHEMA)
    return [tuple(x.flatten().tolist()) for x in receiver.receive(tag)]


def send_behind_strangers(worker: Worker) -> list[tuple[float, ...]]:
    """Send one message once the others have connected; return what was sent."""
    worker.meet("strangers")
    sender, _ = worker.ends
    tensors = content(1, 0)
    sender.send(message_tag(SCHEMA, 0, 0), tensors, SCHEMA)
    sender.flush(10.0)
    return [tuple(x.flatten().tolist()) for x in tensors]


def test_strangers_and_what_they_send_are_turned_away(tmp_path: Path) -> None:
    """Any process of the same user sees the name and may connect, and be first."""
    settings = Settings(SHARED)
    received, sent = run_pair(
        tmp_path, settings, receive_among_strangers, send_behind_strangers
    )

    assert received.error == sent.error == ""
    assert received.value == sent.value
