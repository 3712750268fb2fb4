"""What only the transport over torch.distributed promises: numbers for gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import RunError
from hocket.run.cluster.group import new_group
from hocket.run.comm.dist.transport import TorchTransport, wire_number
from hocket.run.comm.schema import message_tag
from tests.run.support.transport_pair import (
    BACK,
    SCHEMA,
    THERE,
    TORCH,
    Settings,
    Worker,
    content,
    run_both,
    run_pair,
    same,
    tags_of,
)

ways = st.tuples(
    st.integers(0, 1023), st.integers(0, 10**9), st.integers(0, 2**128 - 1)
)


@given(ways, ways)
def test_numbers_are_unique_among_messages_on_their_way(
    a: tuple[int, int, int], b: tuple[int, int, int]
) -> None:
    """31 bits; two channels differ, and so do messages less than 1024 apart."""
    assert 0 <= wire_number(*a) < 1 << 31
    if a[0] != b[0] or 0 < abs(a[1] - b[1]) < 1024:
        assert wire_number(*a) != wire_number(*b)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_numbers_tell_microbatches_apart(a: int, b: int) -> None:
    """Two ends that disagree about the order do not take each other's messages."""
    numbers = [wire_number(0, 0, message_tag(SCHEMA, 3, mb)) for mb in (a, b)]

    assert (a == b) == (numbers[0] == numbers[1])


def send_another(worker: Worker) -> None:
    """Send microbatch 2."""
    sender, _ = worker.ends
    sender.send(message_tag(SCHEMA, 3, 2), content(0, 0), SCHEMA)
    sender.flush(30.0)


def expect_one(worker: Worker) -> None:
    """Expect microbatch 1."""
    _, receiver = worker.ends
    tag = message_tag(SCHEMA, 3, 1)
    receiver.expect([tag], SCHEMA)
    receiver.receive(tag)


@pytest.mark.timeout(110)
def test_a_disagreement_ends_with_the_wait(tmp_path: Path) -> None:
    """gloo can not say what came instead; no tensor is handed out."""
    settings = Settings(TORCH, timeout_s=1.0)
    _, outcome = run_pair(tmp_path, settings, send_another, expect_one)

    assert outcome.kind == "WaitError"
    assert "step 3, microbatch 1: waited 1.0 s for rank 0" in outcome.error
    assert "its messages are others than those expected" in outcome.error


def test_refuses_more_channels_than_there_are_numbers() -> None:
    """Two channels with one number would mix their messages."""
    store = dist.HashStore()
    store.add("num channels", 1024)
    transport = TorchTransport(store, timeout_s=1.0)
    with pytest.raises(RunError, match="1024 channels, no more"):
        transport.sender(THERE)


def with_own_group(worker: Worker) -> list[int]:
    """Exchange messages in a group of the transport's own; how many groups there are.

    Before it is made, while it is there, and when it has been closed twice.
    """
    groups = dist.distributed_c10d._world.pg_map
    counts = [len(groups)]
    transport = TorchTransport(
        dist.PrefixStore("own group", worker.store),
        timeout_s=20.0,
        group=new_group([0, 1], 20.0, "gloo"),
    )
    counts.append(len(groups))
    out, back = (THERE, BACK) if worker.rank == 0 else (BACK, THERE)
    sender, receiver = transport.sender(out), transport.receiver(back)
    (tag,) = tags_of(SCHEMA, 1)
    receiver.expect([tag], SCHEMA)
    sender.send(tag, content(worker.rank, 0), SCHEMA)
    assert same(receiver.receive(tag), content(1 - worker.rank, 0))
    sender.flush(10.0)
    worker.meet("received")
    for _ in range(2):
        transport.close()
    counts.append(len(groups))
    worker.meet("closed")
    return counts


@pytest.mark.timeout(110)
def test_its_own_group_ends_with_it(tmp_path: Path) -> None:
    """And not the job's: throw-away transports leave nothing behind."""
    assert run_both(tmp_path, Settings(TORCH), with_own_group) == [[1, 2, 1]] * 2


def leave_first(worker: Worker) -> int:
    """Leave the job, and then close a transport with a group of its own."""
    group = new_group([0, 1], 20.0, "gloo")
    transport = TorchTransport(worker.store, timeout_s=20.0, group=group)
    worker.meet("end")
    dist.destroy_process_group()
    transport.close()
    return len(dist.distributed_c10d._world.pg_map)


@pytest.mark.timeout(110)
def test_the_job_may_be_left_before(tmp_path: Path) -> None:
    """Its groups are gone then, and no error is raised."""
    assert run_both(tmp_path, Settings(TORCH), leave_first) == [0, 0]
