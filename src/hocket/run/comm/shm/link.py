"""A socket between two processes of one host: packets in order, and end-of-file.

A connected unix-domain socket (sequenced packets). It carries a few bytes per message
and, now and then, a file descriptor; what messages hold is in memory that both map.

    waiting:   look again and again for up to 1 ms,  ──▶ sleep in poll()
               as long as nothing else needs the core      until a packet, the other's
               (waking a sleeper costs 25 µs)             end, or the deadline

The kernel's locks around the packet queue order the two processes' memory: what one
wrote before it posted a packet, the other sees once it has fetched it, on every kind of
processor. Nothing has a name in a file system, so nothing is left behind, however we
end.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final

from hocket.run.comm.shm.packets import MAX_PACKET_BYTES

SPIN_S: Final = 1e-3  # of polling without a packet; _WAKE_S is at most 2.5 % of it
_WAKE_S: Final = 25e-6  # what sleeping and being woken costs
_CROWDED_S: Final = 50e-6  # a look takes 1 µs; if it took so long, the core was shared

_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group
_DESCRIPTOR: Final = struct.Struct("i")
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_DESCRIPTOR.size)


class SocketLink:
    """One process's end of a connection.

    Attributes:
        pid: the other process's id; 0 if it is not visible from here.
        peer_gone: whether the other end is closed or dead, and nothing is left to
            fetch.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connected socket."""
        connection.setblocking(False)
        self._socket = connection
        self.pid, self._user = _other(connection)
        self.peer_gone = False
        self._spin_s = SPIN_S
        self._num_sleeps = 0  # waits that do not even begin to look
        self._arrival = select.poll()
        self._arrival.register(connection, select.POLLIN)
        self._anything = select.poll()
        self._anything.register(connection, select.POLLIN)
        # A child that the other process forked (a data loader's) keeps its socket open
        # after its death, so the process itself is watched too.
        self._process = _open_process(self.pid)
        if self._process is not None:
            self._anything.register(self._process, select.POLLIN)

    @property
    def trusted(self) -> bool:
        """Whether the other process belongs to the same user."""
        return self._user == os.getuid()

    def post(self, packet: bytes, descriptor: int | None = None) -> bool:
        """Send a packet; return False if the queue has no room for it now.

        Packets to an end that is gone are lost; `wait` and `fetch` detect that.
        """
        try:
            if descriptor is None:
                self._socket.send(packet)
            else:
                socket.send_fds(self._socket, [packet], [descriptor])
        except BlockingIOError:
            return False
        except ConnectionError:
            pass
        return True

    def has_packet(self) -> bool:
        """Return whether there is a packet or the end; cheaper than `fetch`."""
        return bool(self._arrival.poll(0))

    def fetch(self) -> tuple[bytes, int | None] | None:
        """Return the next packet, if there is one, with its file descriptor."""
        while True:
            try:
                packet, ancillary, _, _ = self._socket.recvmsg(
                    MAX_PACKET_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return None
            except ConnectionError:
                continue  # reported once, ahead of packets that are still in the queue
            if not packet:
                self.peer_gone = True
                return None
            return packet, _descriptor(ancillary) if ancillary else None

    def wait(self, timeout_s: float) -> None:
        """Wait for something to fetch, the other end's exit, or the timeout."""
        begin_s = time.perf_counter()
        if self._spin(begin_s + min(self._spin_s, timeout_s)):
            return
        events = self._anything.poll(max(0, math.ceil(timeout_s * 1e3)))
        # Look long only as long as that has a chance.
        short = time.perf_counter() - begin_s < SPIN_S
        self._spin_s = SPIN_S if short else self._spin_s / 2
        if events and not self.has_packet():
            self.peer_gone = True

    def close(self) -> None:
        """Close the connection; the other end notices. Idempotent."""
        self.peer_gone = True
        # Also ends the connection for a forked child, which holds the socket too.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._process is not None:
            os.close(self._process)
            self._process = None

    def _spin(self, until_s: float) -> bool:
        """Poll repeatedly for something to fetch; return whether it came.

        If other processes want the core, sleeping ends sooner than yielding. As many
        waits as cost the same time then sleep at once.
        """
        if self._num_sleeps:
            self._num_sleeps -= 1
            return self.has_packet()
        now_s = time.perf_counter()
        while not self.has_packet():
            os.sched_yield()
            last_s, now_s = now_s, time.perf_counter()
            if now_s - last_s > _CROWDED_S:
                self._num_sleeps = int((now_s - last_s) / _WAKE_S)
                return self.has_packet()
            if now_s >= until_s:
                return False
        return True


def _anyone(link: SocketLink) -> bool:
    return True


class Listener:
    """A socket to which one other process of the same user may connect.

    Attributes:
        name: the name that the other process connects to; random, in no file system.
    """

    def __init__(self) -> None:
        """Start to listen."""
        self.name = f"hocket-{secrets.token_hex(16)}"
        self._socket = _new_socket()
        self._socket.bind("\0" + self.name)
        self._socket.listen()  # others may try, too

    def accept(
        self, timeout_s: float, is_expected: Callable[[SocketLink], bool] = _anyone
    ) -> SocketLink | None:
        """Return the connection; None if it does not come in time.

        Args:
            timeout_s: how long to wait.
            is_expected: whether it is the process that may connect; others of the same
                user are turned away.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            self._socket.settimeout(max(0.0, until_s - time.monotonic()))
            try:
                connection, _ = self._socket.accept()
            except (TimeoutError, BlockingIOError):
                return None
            link = SocketLink(connection)
            if link.trusted and is_expected(link):
                return link
            link.close()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._socket.close()


def connect(name: str, timeout_s: float) -> SocketLink | None:
    """Connect to a listener; return None if the same user has none.

    Args:
        name: the listener's.
        timeout_s: how long to wait while others connect to it.
    """
    connection = _new_socket()
    connection.settimeout(timeout_s)
    try:
        connection.connect("\0" + name)
    except (ConnectionError, TimeoutError):
        connection.close()
        return None
    link = SocketLink(connection)
    if not link.trusted:
        link.close()
        return None
    return link


def own_process() -> str:
    """Return this process's number, and the namespace in which that is its number."""
    return f"{os.getpid()} {_pid_namespace()}"


def number_of(process: str) -> int | None:
    """Return the number of a process; None if another namespace has given it.

    Args:
        process: what `own_process` returned in it.
    """
    number, namespace = process.split(maxsplit=1)
    return int(number) if namespace == _pid_namespace() else None


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, even if its parent has not reaped it yet."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # unknown on this system
    end = select.poll()
    end.register(process, select.POLLIN)
    ended = bool(end.poll(0))
    os.close(process)
    return ended


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _other(connection: socket.socket) -> tuple[int, int]:
    """Return the peer's process and user, as the kernel knows them."""
    found = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    pid, user, _ = _CREDENTIALS.unpack(found)
    return pid, user


def _open_process(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends, if possible."""
    try:
        return os.pidfd_open(pid) if pid else None
    except OSError:
        return None


def _descriptor(ancillary: Sequence[tuple[int, int, bytes]]) -> int:
    ((_, _, data),) = ancillary
    number: int
    (number,) = _DESCRIPTOR.unpack(data)
    return number
