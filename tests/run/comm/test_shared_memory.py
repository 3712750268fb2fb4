"""What only shared memory promises: both sides named, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hocket.run.comm.schema import Schema, message_tag, schema_of
from hocket.run.comm.shm.link import SocketLink
from hocket.run.comm.shm.transport import SharedMemoryTransport, memory_domain
from tests.run.support.transport_pair import (
    BACK,
    SCHEMA,
    SHARED,
    THERE,
    Settings,
    Worker,
    content,
    run_both,
    run_pair,
    run_survivor,
    same,
    seconds_after_fault,
    tags_of,
)

pytestmark = pytest.mark.timeout(110)

LONG_S = 60.0


def send_for_ever(schema: str, microbatch: int, salt: int, worker: Worker) -> None:
    """Send messages until something is wrong."""
    sender, _ = worker.ends
    sent = Schema.parse(schema)
    tensors = [
        torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
        for spec in sent.tensors
    ]
    for number in range(100):
        sender.send(message_tag(sent, 3, microbatch + number, salt), tensors, sent)


def expect_one(schema: str, worker: Worker) -> None:
    """Expect microbatch 1 of step 3."""
    _, receiver = worker.ends
    expected = Schema.parse(schema)
    tag = message_tag(expected, 3, 1)
    receiver.expect([tag], expected)
    receiver.receive(tag)


@pytest.mark.parametrize(
    ("sent", "microbatch", "salt"),
    [
        ("float32[4, 9]", 1, 0),
        ("float64[4, 8]", 1, 0),
        ("float32[4, 8], float32[4]", 1, 0),
        ("float32[4, 8]", 2, 0),
        ("float32[4, 8]", 1, 5),
    ],
    ids=["shape", "type", "number", "order", "batch"],
)
def test_a_disagreement_is_named_on_both_sides(
    tmp_path: Path, sent: str, microbatch: int, salt: int
) -> None:
    """Both workers end with the same sentence, at once; no tensor is handed out."""
    outcomes = run_pair(
        tmp_path,
        Settings(SHARED, timeout_s=LONG_S),
        partial(send_for_ever, sent, microbatch, salt),
        partial(expect_one, "float32[4, 8]"),
    )
    text = (
        "F0>1 (rank 0 to rank 1): rank 1 expects step 3, microbatch 1, float32[4, 8]; "
        f"rank 0 sent step 3, microbatch {microbatch}, {sent}"
    )
    if salt:
        text += "; their batches differ: do both read the same data in one order?"

    assert [outcome.kind for outcome in outcomes] == ["SchemaError"] * 2
    assert [outcome.error for outcome in outcomes] == [text] * 2
    assert max(outcome.wall_s for outcome in outcomes) < LONG_S / 3


def listening() -> list[str]:
    """The addresses at which this process listens, as /proc writes them."""
    own = set()
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            own.add(os.readlink(handle))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


def addresses(worker: Worker) -> list[str]:
    """The names at which the two receivers listened."""
    keys = [f"address/{channel.key}" for channel in (THERE, BACK)]
    return [worker.store.get(key).decode().split()[1] for key in keys]


def look_around(worker: Worker) -> Any:
    """Exchange a message; then say what of it can be seen from outside."""
    sender, receiver = worker.ends
    (tag,) = tags_of(SCHEMA, 1)
    receiver.expect([tag], SCHEMA)
    sender.send(tag, content(worker.rank, 0), SCHEMA)
    receiver.receive(tag)
    worker.meet("here")
    return listening(), sorted(os.listdir("/dev/shm")), addresses(worker)


def test_nothing_listens_and_nothing_has_a_name(tmp_path: Path) -> None:
    """No network interface, no file that others could open or that could stay."""
    before = sorted(os.listdir("/dev/shm"))
    for listened_at, files, names in run_both(tmp_path, Settings(SHARED), look_around):
        assert listened_at == []
        assert files == before
        assert not any(name in Path("/proc/net/unix").read_text() for name in names)


def wait_for_first(worker: Worker) -> None:
    """Wait for a sender that has not connected yet."""
    _, receiver = worker.ends
    (tag,) = tags_of(SCHEMA, 1)
    receiver.expect([tag], SCHEMA)
    worker.meet("here")
    receiver.receive(tag)


def die_before_first(worker: Worker) -> None:
    """Be killed with both ends made and nothing sent."""
    worker.meet("here")
    time.sleep(0.3)
    worker.note_fault()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_killed_before_its_first_message_is_missed(tmp_path: Path) -> None:
    """At once, although nothing connects the two yet; and nothing is left of it."""
    before = sorted(os.listdir("/dev/shm"))
    settings = Settings(SHARED, timeout_s=LONG_S)
    outcome = run_survivor(tmp_path, settings, wait_for_first, die_before_first)
    store = dist.FileStore(str(tmp_path / "store"), 2)
    name = store.get(f"address/{THERE.key}").decode().split()[1]

    assert outcome.kind == "WaitError"
    assert "microbatch 0: rank 1 is gone: its process ended before" in outcome.error
    assert seconds_after_fault(tmp_path, outcome) < LONG_S / 3
    assert sorted(os.listdir("/dev/shm")) == before
    assert name not in Path("/proc/net/unix").read_text()


def test_gives_back_every_descriptor_and_mapping(tmp_path: Path) -> None:
    """Both ends in this process; ten transports in turn leave what they found.

    What was received stays valid after the close.
    """
    kept = []
    counts = []
    for turn in range(10):
        store = dist.PrefixStore(str(turn), dist.HashStore())
        transport = SharedMemoryTransport(store, timeout_s=1.0)
        sender, receiver = transport.sender(THERE), transport.receiver(THERE)
        for size in (10, 100_000):
            tensor = torch.full((size,), float(turn))
            schema = schema_of([tensor])
            tag = message_tag(schema, turn, 0)
            sender.send(tag, [tensor], schema)
            receiver.expect([tag], schema)
            (received,) = receiver.receive(tag)
        kept.append(received)
        transport.close()
        transport.close()
        del sender, receiver, transport
        counts.append((len(os.listdir("/proc/self/fd")), _num_mappings()))

    assert counts[-1] == counts[1]
    assert [x[0].item() for x in kept] == list(range(10))


def _num_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:hocket")


def send_hundreds(worker: Worker) -> bool:
    """Fill more slots than the kernel queues packets for."""
    sender, receiver = worker.ends
    tags = tags_of(SCHEMA, 1500)
    if worker.rank == 0:
        for number, tag in enumerate(tags):
            sender.send(tag, content(0, number), SCHEMA)
        worker.meet("end")
        return True
    receiver.expect(tags, SCHEMA)
    time.sleep(0.5)
    right = all(
        same(receiver.receive(tag), content(0, number))
        for number, tag in enumerate(tags)
    )
    worker.meet("end")
    return right


def test_there_may_be_more_slots_than_the_kernel_queues_packets(
    tmp_path: Path,
) -> None:
    """The sender then waits for room in the queue, not for a slot."""
    settings = Settings(SHARED, num_buffers=1000)

    assert run_both(tmp_path, settings, send_hundreds) == [True, True]


def where(worker: Worker) -> str:
    """This worker's place."""
    assert worker.transport is not None
    return memory_domain()


def test_processes_of_one_host_are_in_one_place(tmp_path: Path) -> None:
    """That is how workers find out whether they can share memory."""
    here, there = run_both(tmp_path, Settings(SHARED), where)

    assert here == there == memory_domain()
    assert str(os.getuid()) in here


def send_some(num: int, worker: Worker) -> int:
    """Send until all are on their way; how many packets came back meanwhile."""
    sender, _ = worker.ends
    reported = 0
    fetch = SocketLink.fetch

    def counting(link: SocketLink) -> Any:
        nonlocal reported
        fetched = fetch(link)
        reported += fetched is not None
        return fetched

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SocketLink, "fetch", counting)
        for number, tag in enumerate(tags_of(SCHEMA, num)):
            sender.send(tag, content(0, number), SCHEMA)
        worker.meet("received")
        sender.flush(10.0)
    worker.meet("end")
    return reported


def receive_some(num: int, worker: Worker) -> bool:
    """Receive them all, and say goodbye before the sender looks."""
    _, receiver = worker.ends
    tags = tags_of(SCHEMA, num)
    receiver.expect(tags, SCHEMA)
    right = all(
        same(receiver.receive(tag), content(0, number))
        for number, tag in enumerate(tags)
    )
    receiver.close()
    worker.meet("received")
    worker.meet("end")
    return right


@pytest.mark.parametrize(("num_uncredited", "num_reported"), [(0, 22), (1, 11), (3, 6)])
def test_several_small_messages_are_acknowledged_together(
    tmp_path: Path, num_uncredited: int, num_reported: int
) -> None:
    """That delays no worker, and after the last message the sender knows all.

    The 22nd of 22 is the second after the fifth four.
    """
    settings = Settings(SHARED, num_uncredited=num_uncredited)
    outcomes = run_pair(
        tmp_path, settings, partial(send_some, 22), partial(receive_some, 22)
    )

    assert [outcome.value for outcome in outcomes] == [num_reported, True]
