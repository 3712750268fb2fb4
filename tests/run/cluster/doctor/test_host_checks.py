"""The doctor on one host: what each check makes of what it saw, and that it sees."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch

import hocket
from hocket.run.cluster.doctor.examine import (
    DEFAULT_PORT,
    Cores,
    Naming,
    Ports,
    judge_cores,
    judge_default_port,
    judge_free_ports,
    judge_load,
    judge_name,
    probe_cores,
    probe_name,
    probe_ports,
)
from hocket.run.cluster.doctor.finding import Finding, Severity, worst
from hocket.run.cluster.doctor.limits import (
    DiskSpace,
    HostMemory,
    Limits,
    judge_disk,
    judge_locked_memory,
    judge_memory,
    judge_open_files,
    judge_shared_memory,
    probe_disk,
    probe_limits,
    probe_memory,
    probe_shared_memory,
)
from hocket.run.cluster.doctor.versions import (
    RequiredPackage,
    SoftwareVersions,
    judge_encoding,
    judge_same_versions,
    judge_versions,
    probe_versions,
)
from tests.run.support.processes import environment

GIB: Final = 2**30
MIB: Final = 2**20


def check(finding: Finding, severity: Severity, *reported: str) -> None:
    """The severity, words that must be in the text, and a way out where one is due."""
    assert finding.severity is severity, finding
    for words in reported:
        assert words in f"{finding.found} | {finding.mend}"
    assert bool(finding.mend) == (severity is not Severity.OK)


def test_findings_travel_as_json() -> None:
    """From the workers to the one that reports."""
    finding = Finding("disk", Severity.WARN, "little", "delete", {"free": 3}, "node-a")
    assert Finding.from_json(finding.to_json()) == finding
    good = Finding("load", Severity.OK, "none")
    assert worst([good]) is Severity.OK
    assert worst([good, finding]) is Severity.WARN
    assert worst([finding, Finding("a", Severity.FAIL, ""), good]) is Severity.FAIL


# ------------------------------------------------------------------- the host's name

NAMING: Final = Naming("node-a", ("10.0.0.1",), "", ("127.0.0.1", "10.0.0.1"), "")


def test_a_name_that_leads_here() -> None:
    """With or without a job."""
    check(judge_name(NAMING), Severity.OK, "node-a is 10.0.0.1")
    check(judge_name(replace(NAMING, used="10.0.0.1")), Severity.OK)


def test_a_host_without_a_network() -> None:
    """It is not resolved, so that its name may lead nowhere."""
    alone = replace(NAMING, resolved=("127.0.1.1",), own=("127.0.0.1", "::1"))
    check(judge_name(alone), Severity.OK)


@pytest.mark.parametrize(
    ("resolved", "error", "reported"),
    [
        ((), "Name or service not known", "does not resolve (Name or service not"),
        (("127.0.1.1", "::1"), "", "look for this one on themselves"),
        (("10.9.9.9",), "", "this host has other addresses (127.0.0.1, 10.0.0.1)"),
        (("127.0.0.1", "10.0.0.1"), "", "the other hosts reach it at 10.0.0.2"),
    ],
)
def test_a_name_that_leads_elsewhere(
    resolved: tuple[str, ...], error: str, reported: str
) -> None:
    """Each of the ways that stop several hosts, Debian's 127.0.1.1 among them."""
    naming = replace(NAMING, resolved=resolved, error=error, used="10.0.0.2")
    mend = "write `10.0.0.2 node-a` into /etc/hosts"
    check(judge_name(naming), Severity.WARN, reported, mend, "--local-addr 10.0.0.2")


def test_the_name_is_looked_up() -> None:
    """It is this host's, with all its addresses."""
    naming = probe_name("10.0.0.7")
    assert naming.name == socket.gethostname()
    assert naming.resolved or naming.error
    assert "127.0.0.1" in naming.own
    assert naming.used == "10.0.0.7"


# --------------------------------------------------------------------------- limits

LIMITS: Final = Limits(65536, 65536, -1, has_infiniband=False)


@pytest.mark.parametrize(
    ("soft", "hard", "num_workers", "severity", "reported"),
    [
        (65536, 65536, 2, Severity.OK, "65,536 files"),
        (-1, -1, 512, Severity.OK, ""),
        (1024, 4096, 2, Severity.WARN, "`ulimit -n 4096`"),
        (1024, -1, 2, Severity.WARN, "`ulimit -n 65536`"),
        (1024, 1024, 2, Severity.WARN, "raise the hard limit (1,024)"),
        (100, 1024, 2, Severity.FAIL, "each of 2 workers needs about 144"),
        (1024, 1024, 256, Severity.FAIL, "each of 256 workers needs about 2,176"),
    ],
)
def test_open_files(
    soft: int, hard: int, num_workers: int, severity: Severity, reported: str
) -> None:
    """The more workers, the more sockets."""
    limits = replace(LIMITS, open_files=soft, most_open_files=hard)
    check(judge_open_files(limits, num_workers), severity, reported)


def test_the_limits_are_this_process_s() -> None:
    """The parent process may have lowered them."""
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200));"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096));"
        "from hocket.run.cluster.doctor.limits import *;"
        "found = probe_limits(); print(found.open_files, found.locked_bytes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "200 4096\n", done.stderr
    assert probe_limits().open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_locked_memory() -> None:
    """Only adapters that write into memory by themselves need it."""
    check(judge_locked_memory(LIMITS), Severity.OK, "any amount")
    few = replace(LIMITS, locked_bytes=8 * MIB)
    check(judge_locked_memory(few), Severity.OK, "8 MiB may be locked")
    few = replace(few, has_infiniband=True)
    check(judge_locked_memory(few), Severity.WARN, "8 MiB", "ulimit -l unlimited")


# ----------------------------------------------------------------------------- room


@pytest.mark.parametrize(
    ("free_bytes", "severity"),
    [(8 * GIB, Severity.OK), (64 * MIB, Severity.WARN), (MIB, Severity.FAIL)],
)
def test_shared_memory(free_bytes: int, severity: Severity) -> None:
    """What docker gives is too little for a data loader of images."""
    space = DiskSpace("/dev/shm", 16 * GIB, free_bytes, -1)
    reported = ["of 16 GiB free"] + ["--shm-size=8g"] * (severity is not Severity.OK)
    check(judge_shared_memory(space), severity, *reported)


@pytest.mark.parametrize(
    ("space", "severity", "reported"),
    [
        (DiskSpace("/data", GIB, 100 * GIB, 5), Severity.OK, "100 GiB free in /data"),
        (DiskSpace("/data", GIB, 5 * GIB, 5), Severity.WARN, "old checkpoints"),
        (DiskSpace("/data", GIB, 100 * MIB, 5), Severity.FAIL, "100 MiB free"),
        (DiskSpace("/data", GIB, 100 * GIB, 0), Severity.FAIL, "no file can be made"),
        (DiskSpace("/data", GIB, 100 * GIB, -1), Severity.OK, "100 GiB"),
        (
            DiskSpace("/data", GIB, 100 * GIB, 5, "Read-only file system"),
            Severity.FAIL,
            "nothing can be written: Read-only file system",
        ),
    ],
)
def test_disk(space: DiskSpace, severity: Severity, reported: str) -> None:
    """Bytes, files, and the right to write."""
    check(judge_disk(space), severity, reported)


def test_memory() -> None:
    """Shared among the workers of the host."""
    check(
        judge_memory(HostMemory(16 * GIB), 4),
        Severity.OK,
        "4 GiB for each of 4 workers",
    )
    check(judge_memory(HostMemory(4 * GIB), 4), Severity.WARN, "1 GiB for each")
    check(judge_memory(HostMemory(GIB), 4), Severity.FAIL, "256 MiB for each")


def test_room_is_looked_for(tmp_path: Path) -> None:
    """The disk's of the folder, or of where it would be made; nothing stays there."""
    found = probe_disk(tmp_path / "not" / "yet")
    assert found.path == str(tmp_path)
    assert not found.error
    reported = os.statvfs(tmp_path)
    assert found.total_bytes == reported.f_blocks * reported.f_frsize
    assert list(tmp_path.iterdir()) == []
    assert probe_shared_memory().path == "/dev/shm"
    assert MIB < probe_memory().available_bytes < 2**50


def test_a_folder_that_cannot_be_written_to() -> None:
    """Not even by root."""
    check(
        judge_disk(probe_disk(Path("/proc"))), Severity.FAIL, "nothing can be written"
    )


# ---------------------------------------------------------------------------- cores


@pytest.mark.parametrize(
    ("cores", "severity", "reported"),
    [
        (Cores(8, 2, 4, 0.0), Severity.OK, "2 workers x 4 threads on 8 cores"),
        (Cores(8, 4, 8, 0.0), Severity.WARN, "OMP_NUM_THREADS=2"),
        (Cores(1.5, 1, 8, 0.0), Severity.WARN, "OMP_NUM_THREADS=1"),
        (Cores(2, 4, 1, 0.0), Severity.WARN, "start fewer workers"),
    ],
)
def test_cores(cores: Cores, severity: Severity, reported: str) -> None:
    """Threads that wait for each other's cores are slower than none."""
    check(judge_cores(cores), severity, reported)


def test_load() -> None:
    """Other processes' work makes every profile wrong."""
    check(judge_load(Cores(4, 1, 1, 0.5)), Severity.OK)
    check(judge_load(Cores(4, 1, 1, 5.25)), Severity.WARN, "5.2 on 4 cores")


def test_cores_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that this process may use, for the workers of this host."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    found = probe_cores()
    assert 0 < found.num_cores <= len(os.sched_getaffinity(0))
    assert (found.num_workers, found.num_threads) == (3, torch.get_num_threads())


# ---------------------------------------------------------------------------- ports


@pytest.mark.parametrize(
    ("num_used", "severity"),
    [(100, Severity.OK), (25_000, Severity.WARN), (28_200, Severity.FAIL)],
)
def test_free_ports(num_used: int, severity: Severity) -> None:
    """A job of many workers needs hundreds."""
    check(judge_free_ports(Ports(28_232, num_used, ())), severity, "of 28,232 are free")


def test_default_port() -> None:
    """A second job of torchrun's on one host needs another port."""
    check(judge_default_port(Ports(28_232, 0, (80,))), Severity.OK)
    taken = judge_default_port(Ports(28_232, 0, (80, DEFAULT_PORT)))
    check(taken, Severity.WARN, "is taken", "--master-port")


def test_ports_are_read() -> None:
    """One that is listened on is seen, and counted as used."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = probe_ports()
        assert port in found.listening
        assert 0 < found.num_used < found.num_ports
    assert port not in probe_ports().listening


# ------------------------------------------------------------------------- versions

VERSIONS: Final = SoftwareVersions(
    "0.1.0",
    "2.13.0+cpu",
    "3.11.4",
    (RequiredPackage("torch", "2.11", "2.13.0"),),
    "UTF-8",
)


def test_versions() -> None:
    """What is needed is there, and new enough; numbers, not letters, are compared."""
    check(judge_versions(VERSIONS), Severity.OK, "torch 2.13.0+cpu")
    old = replace(VERSIONS, needed=(RequiredPackage("torch", "2.11", "2.9.1+cu128"),))
    reported = "torch 2.9.1+cu128 (needs 2.11 or newer)"
    check(judge_versions(old), Severity.FAIL, reported, "pip install")
    none = replace(VERSIONS, needed=(RequiredPackage("typer", "", ""),))
    check(judge_versions(none), Severity.FAIL, "typer is missing")


def test_encoding() -> None:
    """A container without a locale reads text as ASCII."""
    check(judge_encoding(VERSIONS), Severity.OK)
    check(judge_encoding(replace(VERSIONS, encoding="utf8")), Severity.OK)
    ascii_only = replace(VERSIONS, encoding="ANSI_X3.4-1968")
    check(judge_encoding(ascii_only), Severity.WARN, "PYTHONUTF8=1")


def test_same_versions() -> None:
    """Of each worker; a patch release or a build is no difference."""
    same = {"hocket": "0.1.0", "torch": "2.13.0", "python": "3.11.4"}
    build = {**same, "torch": "2.13.1+cpu", "python": "3.11.9"}
    check(judge_same_versions([same, build]), Severity.OK, "all 2 workers")
    other = judge_same_versions([same, {**same, "torch": "2.12.0"}])
    check(other, Severity.FAIL, "torch is 2.13.0 at rank 0 and 2.12.0 at rank 1")
    other = judge_same_versions([same, same, {**same, "python": "3.12.1"}])
    check(other, Severity.WARN, "3.12.1 at rank 2")


def test_versions_are_asked() -> None:
    """Of the packages themselves."""
    found = probe_versions()
    assert (found.hocket, found.torch) == (hocket.__version__, torch.__version__)
    assert "torch" in {one.name for one in found.needed}
    check(judge_versions(found), Severity.OK)
