"""The line between two processes: packets, descriptors, and the other's end."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.run.comm.shm.link import Listener, SocketLink, connect
from hocket.run.comm.shm.packets import (
    MAX_PACKET_BYTES,
    CreditPacket,
    ErrorPacket,
    MessagePacket,
    Packet,
    SchemaPacket,
    pack,
    unpack,
)

pytestmark = pytest.mark.timeout(60)

digests = st.integers(0, 2**32 - 1)
packets = st.one_of(
    st.builds(MessagePacket, st.integers(0, 2**128 - 1), digests),
    st.builds(SchemaPacket, digests, st.integers(0, 2**40), st.text(max_size=100)),
    st.builds(CreditPacket, digests),
    st.builds(ErrorPacket, st.text(max_size=100)),
)


@given(packets)
def test_packets_arrive_as_they_were(packet: Packet) -> None:
    """What is unpacked is what was packed."""
    assert unpack(pack(packet)) == packet


@given(st.text(alphabet="aé€🙂", min_size=400, max_size=3000))
def test_long_texts_are_cut(text: str) -> None:
    """A packet is never longer than what the other end reads, nor is half a letter."""
    data = pack(ErrorPacket(text))
    assert len(data) <= MAX_PACKET_BYTES
    cut = unpack(data)
    assert isinstance(cut, ErrorPacket)
    assert text.startswith(cut.text)
    assert len(cut.text) >= 400


def two_ends() -> tuple[SocketLink, SocketLink]:
    """A connection with both ends in this process."""
    listener = Listener()
    a = connect(listener.name, 1.0)
    b = listener.accept(1.0)
    listener.close()
    assert a is not None
    assert b is not None
    return a, b


def test_packets_keep_their_order_and_their_limits() -> None:
    """One fetch is one packet; nothing there is None."""
    a, b = two_ends()
    for n in range(10):
        assert a.post(bytes([n]) * (n + 1))
    fetched = [b.fetch() for _ in range(11)]

    assert fetched == [(bytes([n]) * (n + 1), None) for n in range(10)] + [None]
    assert not b.peer_gone
    a.close()
    b.close()


def test_a_descriptor_travels_with_its_packet() -> None:
    """The other end gets one of its own, closed on exec."""
    a, b = two_ends()
    memory = os.memfd_create("test")
    os.write(memory, b"hello")
    assert a.post(b"x", memory)
    os.close(memory)
    fetched = b.fetch()

    assert fetched is not None
    packet, descriptor = fetched
    assert packet == b"x"
    assert descriptor is not None
    assert os.pread(descriptor, 5, 0) == b"hello"
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    a.close()
    b.close()


def test_what_was_posted_before_the_end_is_still_fetched() -> None:
    """Also when the end that closed had not fetched everything itself."""
    a, b = two_ends()
    b.post(b"never fetched")
    a.post(b"1")
    a.post(b"2")
    a.close()

    assert b.fetch() == (b"1", None)
    assert b.fetch() == (b"2", None)
    assert not b.peer_gone
    assert b.fetch() is None
    assert b.peer_gone
    b.close()


def test_a_wait_ends_by_the_deadline() -> None:
    """Or at once, where there is something to fetch, or no sender any more."""
    a, b = two_ends()
    begin_s = time.monotonic()
    b.wait(0.2)
    assert 0.2 <= time.monotonic() - begin_s < 5.0
    a.post(b"x")
    b.wait(30.0)
    assert b.fetch() == (b"x", None)
    a.close()
    b.wait(30.0)
    assert b.fetch() is None
    assert b.peer_gone
    assert time.monotonic() - begin_s < 10.0
    b.close()


def test_a_full_queue_is_reported() -> None:
    """`post` never blocks; once the other end has fetched, there is room again."""
    a, b = two_ends()
    num_posted = 0
    while a.post(b"x" * 100):
        num_posted += 1
        assert num_posted < 100_000
    while b.fetch() is not None:
        num_posted -= 1

    assert num_posted == 0
    assert a.post(b"x")
    a.close()
    b.close()


def test_an_address_without_a_listener_is_reported() -> None:
    """Not there, or there no more."""
    listener = Listener()
    listener.close()

    assert connect(listener.name, 1.0) is None
    assert connect("hocket-never", 1.0) is None


def test_accept_ends_by_the_deadline() -> None:
    """With no time at all, it only looks."""
    listener = Listener()
    assert listener.accept(0.0) is None
    assert listener.accept(0.05) is None
    a = connect(listener.name, 1.0)
    assert a is not None
    b = listener.accept(0.0)

    assert b is not None
    assert b.pid == os.getpid()
    a.close()
    b.close()
    listener.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user: run as root")
def test_other_users_are_turned_away() -> None:
    """Names of sockets are visible to all users of a host, and guessed by none."""
    listener = Listener()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        os._exit(int(connect(listener.name, 1.0) is not None))
    link = listener.accept(0.3)
    _, status = os.waitpid(child, 0)
    listener.close()

    assert link is None
    assert os.waitstatus_to_exitcode(status) == 0
