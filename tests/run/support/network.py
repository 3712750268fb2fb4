"""Two hosts on one machine: network namespaces with a cable between them.

    namespace a                     namespace b
    lo  127.0.0.1                   lo  127.0.0.1
    cable 10.203.0.1 ═════════════ cable 10.203.0.2

They share files and clocks, as hosts with a network file system do. Nothing leads out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from tests.run.support.forked_python import ForkedPython, start_python
from tests.run.support.processes import environment, eventually

ADDRESSES: Final = ("10.203.0.1", "10.203.0.2")
HOST_NAMES: Final = ("node-a", "node-b")
PORT: Final = 29500
# Of <sched.h> and <sys/mount.h>.
_CLONE_NEWNS: Final = 0x00020000
_CLONE_NEWUTS: Final = 0x04000000
_CLONE_NEWNET: Final = 0x40000000
_MS_BIND: Final = 0x1000
_MS_REC: Final = 0x4000
_MS_SLAVE: Final = 0x80000
_MNT_DETACH: Final = 2
_num_pairs = count()


@cache
def why_not() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if os.getuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip"):
        return "there is no `ip` (iproute2)"
    name = f"hk-try-{os.getpid()}"
    done = subprocess.run(
        ["ip", "netns", "add", name], capture_output=True, check=False, timeout=10
    )
    if done.returncode:
        return f"no network namespaces: {done.stderr.decode().strip()}"
    _ip("netns", "del", name)
    return ""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Both hosts.

    Args:
        names: of the namespaces.
        have_names: whether each has a host name of its own, which leads to its address;
            else both have this machine's, and it leads to the loopback, as Debian
            writes it into /etc/hosts.
        started: what runs on either, or ran.
    """

    names: tuple[str, str]
    have_names: bool
    started: list[ForkedPython] = field(default_factory=list)

    def start(
        self, host: int, arguments: Sequence[str], folder: Path, **extra: str
    ) -> ForkedPython:
        """Python with these arguments, on one host; what it says goes into a file.

        Args:
            host: 0 or 1.
            arguments: of Python.
            folder: of the test; output goes to `out-0.txt` and `err-0.txt` in it.
            extra: variables of the environment.
        """
        outputs = folder / f"out-{host}.txt", folder / f"err-{host}.txt"
        path = f"{environment()['PATH']}:/usr/sbin:/sbin"
        process = start_python(
            arguments,
            outputs,
            {**environment(), "PATH": path, **extra},
            enter=partial(
                _enter, self.names[host], HOST_NAMES[host] if self.have_names else ""
            ),
        )
        self.started.append(process)
        return process

    def torchrun(
        self,
        host: int,
        options: Sequence[str],
        script: Sequence[str],
        folder: Path,
        **extra: str,
    ) -> ForkedPython:
        """Torch's launcher on one of the two hosts, for a script."""
        two = ["-m", "torch.distributed.run", "--nnodes", "2"]
        return self.start(host, [*two, *options, *script], folder, **extra)

    def cut(self) -> None:
        """Take the cable out: from now on, packets are lost without a word."""
        for name in self.names:
            _ip("-n", name, "link", "set", "cable", "down")

    def limit(self, rate: str) -> None:
        """Let the cable carry no more than this, like `100mbit`."""
        shape = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
        for name in self.names:
            command = ["tc", "-n", name, "qdisc", "add", "dev", "cable", *shape]
            subprocess.run(command, check=True, timeout=10)

    def pids(self) -> list[int]:
        """The processes that run on either."""
        reported = [_ip("netns", "pids", name) for name in self.names]
        return [int(pid) for text in reported for pid in text.split()]


@contextlib.contextmanager
def two_hosts(*, have_names: bool = False) -> Iterator[Hosts]:
    """Make both hosts; end all that runs on them, and remove them.

    Args:
        have_names: see `Hosts`.
    """
    if why_not():
        pytest.skip(why_not())
    tag = f"hk-{os.getpid()}-{next(_num_pairs)}"
    hosts = Hosts((f"{tag}-a", f"{tag}-b"), have_names)
    try:
        _make(hosts)
        yield hosts
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            for pid in hosts.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            eventually(lambda: not hosts.pids(), 5.0)
        for process in hosts.started:
            process.kill()
            process.wait()
        for name in hosts.names:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=10)
            shutil.rmtree(_etc(name), ignore_errors=True)


def codes_of(
    launchers: Sequence[ForkedPython], seconds: float, folder: Path
) -> list[int]:
    """How processes ended; the test fails if they do not within some seconds."""
    deadline_s = time.monotonic() + seconds
    try:
        return [p.wait(max(0.1, deadline_s - time.monotonic())) for p in launchers]
    except subprocess.TimeoutExpired:
        pytest.fail(f"no end within {seconds:g} s\n{outputs(folder)}")


def outputs(folder: Path) -> str:
    """What everybody said, for the message of a failed test."""
    files = sorted(folder.glob("*.txt"))
    return "\n".join(f"== {file.name}\n{file.read_text()[-6000:]}" for file in files)


def _make(hosts: Hosts) -> None:
    for name in hosts.names:
        _ip("netns", "add", name)
    first, second = hosts.names
    _ip(
        *("link", "add", "cable", "netns", first, "type", "veth"),
        *("peer", "name", "cable", "netns", second),
    )
    for name, address in zip(hosts.names, ADDRESSES, strict=True):
        _ip("-n", name, "addr", "add", f"{address}/30", "dev", "cable")
        for interface in ("lo", "cable"):
            _ip("-n", name, "link", "set", interface, "up")
        _etc(name).mkdir(parents=True)
        # `ip netns exec` puts it in the place of /etc/hosts.
        (_etc(name) / "hosts").write_text(_table(hosts))


def _table(hosts: Hosts) -> str:
    """What /etc/hosts says."""
    lines = ["127.0.0.1 localhost"]
    if hosts.have_names:
        lines += [f"{a} {n}" for a, n in zip(ADDRESSES, HOST_NAMES, strict=True)]
    else:
        lines += [f"127.0.1.1 {socket.gethostname()}"]
    return "".join(f"{line}\n" for line in lines)


def _etc(name: str) -> Path:
    return Path("/etc/netns") / name


def _enter(namespace: str, host_name: str) -> None:
    """Move this process to a host, as `ip netns exec` and `unshare --uts` do."""
    kernel = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: Any) -> None:
        if getattr(kernel, name)(*arguments):
            code = ctypes.get_errno()
            raise OSError(code, f"{name}: {os.strerror(code)}")

    with Path("/run/netns", namespace).open("rb") as file:
        call("setns", file.fileno(), _CLONE_NEWNET)
    call("unshare", _CLONE_NEWNS | (_CLONE_NEWUTS if host_name else 0))
    call("mount", b"none", b"/", None, _MS_REC | _MS_SLAVE, None)
    call("umount2", b"/sys", _MNT_DETACH)
    call("mount", namespace.encode(), b"/sys", b"sysfs", 0, None)
    for path in _etc(namespace).iterdir():
        target = Path("/etc", path.name)
        call("mount", bytes(path), bytes(target), b"none", _MS_BIND, None)
    if host_name:
        socket.sethostname(host_name)


def _ip(*arguments: str) -> str:
    done = subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, text=True, timeout=10
    )
    return done.stdout
