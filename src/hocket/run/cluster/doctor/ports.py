"""Checks that TCP ports are free for connections and for torchrun's rendezvous."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from hocket.run.cluster.doctor.finding import Finding, Severity

DEFAULT_PORT: Final = 29500  # of torchrun
_LISTENS: Final = "0A"  # as /proc/net/tcp writes the state
_FEW_FREE: Final = 256
_ENOUGH_FREE_SHARE: Final = 0.2


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports on this host.

    Args:
        num_ports: ports that the system gives to outgoing connections.
        num_used: how many of these are in use.
        listening: ports on which some program listens.
    """

    num_ports: int
    num_used: int
    listening: tuple[int, ...]


def probe_ports() -> Ports:
    """Read the kernel's tables; nothing is opened."""
    span = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = (
        map(int, span.read_text().split()) if span.exists() else (49152, 65535)
    )
    used: set[int] = set()
    listening: set[int] = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, _, state, *_ = line.split()
            port = int(local.rpartition(":")[2], 16)
            used.add(port)
            if state == _LISTENS:
                listening.add(port)
    num_used = sum(first <= port <= last for port in used)
    return Ports(last - first + 1, num_used, tuple(sorted(listening)))


def judge_free_ports(ports: Ports) -> Finding:
    """Check that connections can still be made."""
    num_free = ports.num_ports - ports.num_used
    found = f"{num_free:,} of {ports.num_ports:,} are free"
    numbers = asdict(ports)
    if num_free >= max(_FEW_FREE, _ENOUGH_FREE_SHARE * ports.num_ports):
        return Finding("free ports", Severity.OK, found, numbers=numbers)
    return Finding(
        "free ports",
        Severity.FAIL if num_free < _FEW_FREE else Severity.WARN,
        f"{found}; every two workers on different hosts need some",
        "`ss -tan` shows who has them; closed ones come back after a minute; "
        '`sysctl net.ipv4.ip_local_port_range="15000 65000"` gives more',
        numbers,
    )


def judge_default_port(ports: Ports) -> Finding:
    """Check that torchrun can listen on its default port."""
    check = f"port {DEFAULT_PORT}"
    if DEFAULT_PORT not in ports.listening:
        return Finding(check, Severity.OK, "torchrun's default is free")
    return Finding(
        check,
        Severity.WARN,
        "torchrun's default is taken: another job runs here, or is left from before",
        f"`ss -tlnp 'sport = {DEFAULT_PORT}'` shows whose it is; else give torchrun "
        "another --master-port, or --standalone on one host",
    )
