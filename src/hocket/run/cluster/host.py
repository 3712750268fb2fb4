"""Identifies a worker's host, and the address at which other hosts reach it.

A host is whatever has a network of its own. Two containers of one machine are two
hosts, though they may share its name, its clock and its cores: neither can reach what
listens on the other's loopback.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_SIOCGIFCONF: Final = 0x8912
# Linux' struct ifreq on 64 bits: a name, then a sockaddr_in (family, port, address).
_RECORD_BYTES: Final = 40
_NAME_BYTES: Final = 16
_ADDRESS_AT: Final = _NAME_BYTES + 4
_MAX_ADDRESSES: Final = 512


def identity() -> str:
    """Return a text that is equal for workers of one host and differs between hosts."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    booted = boot.read_text().strip() if boot.exists() else ""
    network = ""
    with contextlib.suppress(OSError):  # not Linux
        network = os.readlink("/proc/self/ns/net")
    return f"{socket.gethostname()}/{booted}/{network}"


def address_towards(peer: str) -> str:
    """Return this host's address on the route to a peer; empty if there is no route.

    Nothing is sent: a datagram socket that is connected only asks for the route.

    Args:
        peer: a name or an address.
    """
    try:
        found = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return ""
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as way:
            way.connect(address)
            return str(way.getsockname()[0])
    return ""


def is_loopback(address: str) -> bool:
    """Return whether an address means "this host" on every host."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def reachable_address(own: str, others: Sequence[str]) -> str:
    """Return the address at which other hosts reach this one; empty if unknown.

    Where the store is on this very host, its name may lead to the loopback (Debian
    writes `127.0.1.1` into /etc/hosts). Then the route to another host is used.

    Args:
        own: this host's address on the route to the store.
        others: the other hosts' addresses on that route.
    """
    if own and not is_loopback(own):
        return own
    ways = (address_towards(other) for other in others if not is_loopback(other))
    return next((way for way in ways if way and not is_loopback(way)), "")


def interface_with(address: str) -> str:
    """Return the network interface that has an address; empty if none has."""
    wanted = address.partition("%")[0]  # without the scope of a link-local one
    return next((name for name, has in interfaces() if has == wanted), "")


def interfaces() -> Iterator[tuple[str, str]]:
    """Return every address of this host with the name of its interface."""
    yield from _with_ipv4()
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, *_, name = line.split()
        yield name, str(ipaddress.IPv6Address(int(digits, 16)))


def loopback_interface() -> str:
    """Return the loopback's name: `lo` on Linux, `lo0` elsewhere."""
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else "lo0"


def _with_ipv4() -> Iterator[tuple[str, str]]:
    room = array.array("B", bytes(_MAX_ADDRESSES * _RECORD_BYTES))
    start, num_bytes = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        ask = struct.pack("iL", num_bytes, start)
        filled, _ = struct.unpack("iL", fcntl.ioctl(any_socket, _SIOCGIFCONF, ask))
    for at in range(0, filled, _RECORD_BYTES):
        record = room[at : at + _RECORD_BYTES].tobytes()
        name = record[:_NAME_BYTES].partition(b"\0")[0].decode()
        address = record[_ADDRESS_AT : _ADDRESS_AT + 4]
        yield name.partition(":")[0], socket.inet_ntoa(address)  # eth0:1 is eth0's
