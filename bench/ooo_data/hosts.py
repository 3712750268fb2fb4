"""Two hosts on one machine: network namespaces, and a cable with a limited rate.

namespace a                      namespace b
cable 10.204.0.1 ══ tbf ═ tbf ══ cable 10.204.0.2
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

ADDRESSES: Final = ("10.204.0.1", "10.204.0.2")
_POLL_S: Final = 0.2
_CABLE: Final = "cable"
_PORT: Final = "29611"
_BURST: Final = "128kb"  # more than a segment that the kernel hands over at once
_LATENCY: Final = "200ms"  # a queue so long, and nothing is dropped


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Make both, and remove them at the end; needs root and iproute2."""
    names = tuple(f"hocket-{os.getpid()}-{side}" for side in "ab")
    first, second = names
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", _CABLE, "netns", first, "type", "veth", "peer", "name",
            _CABLE, "netns", second)  # fmt: skip
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/30", "dev", _CABLE)
            for interface in ("lo", _CABLE):
                _ip("-n", name, "link", "set", interface, "up")
        yield first, second
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def run_workers(hosts: Sequence[str], module: str, arguments: Sequence[str]) -> None:
    """Run a module on each host, one worker each, and wait for both.

    Raises:
        CalledProcessError: one of them failed.
    """
    processes = []
    for rank, host in enumerate(hosts):
        command = [
            *("ip", "netns", "exec", host),
            *(sys.executable, "-m", module, *arguments),
        ]
        processes.append(subprocess.Popen(command, env=_environment(rank)))
    try:
        while any(process.poll() is None for process in processes):
            for process in processes:
                if code := process.poll():  # the other would wait for it
                    raise subprocess.CalledProcessError(code, module)
            time.sleep(_POLL_S)
        if code := next((x.returncode for x in processes if x.returncode), 0):
            raise subprocess.CalledProcessError(code, module)
    finally:
        for process in processes:
            process.kill()


def set_rate(bytes_per_s: float) -> None:
    """Limit what leaves this host, called on it: the headers are counted, too."""
    bits = f"{round(8 * bytes_per_s)}bit"
    shape = ["root", "tbf", "rate", bits, "burst", _BURST, "latency", _LATENCY]
    subprocess.run(["tc", "qdisc", "replace", "dev", _CABLE, *shape], check=True)


def _environment(rank: int) -> Mapping[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": _PORT,
        "GLOO_SOCKET_IFNAME": _CABLE,
        "OMP_NUM_THREADS": "1",
    }


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=10)
