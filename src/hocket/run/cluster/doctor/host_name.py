"""Checks the host's name: torchrun gives it to the other hosts as an address."""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass
from typing import Final

from hocket.run.cluster.doctor.finding import Finding, Severity
from hocket.run.cluster.host import address_towards, interfaces, is_loopback

_ELSEWHERE: Final = "192.0.2.1"  # kept free for documentation (RFC 5737)


@dataclass(frozen=True, slots=True)
class Naming:
    """The host's name, and the addresses that it resolves to.

    Args:
        name: the host's name.
        resolved: the addresses that the name resolves to on this host.
        error: why it does not resolve; empty if it does.
        own: this host's addresses.
        used: the address at which the other hosts of the job reach this one; on a job
            of one host, and without a job, the one towards the network; empty if there
            is none.
    """

    name: str
    resolved: tuple[str, ...]
    error: str
    own: tuple[str, ...]
    used: str


def probe_name(used: str = "") -> Naming:
    """Resolve the name as other programs do.

    Args:
        used: see `Naming`; if not known, the address towards the network.
    """
    name, error = socket.gethostname(), ""
    resolved: tuple[str, ...] = ()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        resolved = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    except OSError as refused:
        error = str(refused)
    own = tuple(address for _, address in interfaces())
    return Naming(name, resolved, error, own, used or address_towards(_ELSEWHERE))


def judge_name(naming: Naming) -> Finding:
    """Check that other hosts find this one under its name."""
    fault = _fault(naming)
    leads_to = f"{naming.name} is {', '.join(naming.resolved) or 'nowhere'}"
    if not fault:
        return Finding("host name", Severity.OK, leads_to, numbers=asdict(naming))
    address = naming.used or "ADDRESS"
    return Finding(
        "host name",
        Severity.WARN,
        f"{leads_to}: {fault}",
        f"on several hosts, write `{address} {naming.name}` into /etc/hosts of each in "
        f"place of what is there, or give torchrun --local-addr {address}",
        asdict(naming),
    )


def _fault(naming: Naming) -> str:
    """Return what is wrong with the name; empty if nothing is."""
    if naming.error:
        return f"it does not resolve ({naming.error})"
    if all(is_loopback(address) for address in naming.own):
        return ""  # this host has no network, so no other host looks for it
    if all(is_loopback(address) for address in naming.resolved):
        return "under it, other hosts look for this one on themselves"
    if not set(naming.resolved) & set(naming.own):
        return f"this host has other addresses ({', '.join(naming.own)})"
    if naming.used and naming.used not in naming.resolved:
        return f"the other hosts reach it at {naming.used}"
    return ""
