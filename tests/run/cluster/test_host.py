"""Where a worker is: its host, its address, and the interface that has it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hocket.run.cluster.host import (
    address_towards,
    identity,
    interface_with,
    interfaces,
    is_loopback,
    loopback_interface,
    reachable_address,
)
from tests.run.support.network import ADDRESSES, outputs, two_hosts

SCRIPT = """
from hocket.run.cluster.host import *
print(identity())
print(address_towards("10.203.0.1"))
print(interface_with(address_towards("10.203.0.1")))
"""


def test_the_loopback_is_found_by_its_address() -> None:
    """And it is the way to itself."""
    assert interface_with("127.0.0.1") == loopback_interface()
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert ("lo", "127.0.0.1") in list(interfaces())


def test_what_is_not_there_is_empty() -> None:
    """No interface has an address of the documentation; no such name resolves."""
    assert interface_with("192.0.2.77") == ""
    assert address_towards("no-such-host.invalid") == ""


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1"])
def test_loopback_addresses(address: str) -> None:
    """Debian's 127.0.1.1 among them."""
    assert is_loopback(address)
    assert reachable_address(address, [address]) == ""


def test_other_addresses() -> None:
    """They are kept as they are; a name is no address."""
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("fe80::1%eth0")
    assert not is_loopback("localhost")
    assert reachable_address("10.0.0.1", ["127.0.0.1"]) == "10.0.0.1"


def test_one_host_is_one_text() -> None:
    """With its name in it, for people."""
    assert identity() == identity()
    assert identity().startswith(f"{socket.gethostname()}/")


@pytest.mark.network
@pytest.mark.timeout(60)
def test_namespaces_are_hosts(tmp_path: Path) -> None:
    """Of one name and one kernel; each finds its own end of the cable."""
    reported = []
    with two_hosts() as hosts:
        for host in range(2):
            process = hosts.start(host, ["-c", SCRIPT], tmp_path)
            assert process.wait(30) == 0, outputs(tmp_path)
            reported.append((tmp_path / f"out-{host}.txt").read_text().splitlines())
    names, addresses, cables = zip(*reported, strict=True)
    assert len({*names, identity()}) == 3
    assert addresses == ADDRESSES
    assert cables == ("cable", "cable")
