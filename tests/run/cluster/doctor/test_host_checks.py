"""The doctor on one host: what each check makes of what it saw, and that it sees."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch

import hocket
from hocket.run.cluster.doctor.examine import (
    DEFAULT_PORT,
    DiskSpace,
    Ports,
    judge_default_port,
    judge_disk,
    judge_free_ports,
    judge_shared_memory,
    probe_disk,
    probe_ports,
    probe_shared_memory,
)
from hocket.run.cluster.doctor.finding import Finding, Severity, worst
from hocket.run.cluster.doctor.versions import (
    RequiredPackage,
    SoftwareVersions,
    judge_same_versions,
    judge_versions,
    probe_versions,
)

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


def test_room_is_looked_for(tmp_path: Path) -> None:
    """The disk's of the folder, or of where it would be made; nothing stays there."""
    found = probe_disk(tmp_path / "not" / "yet")
    assert found.path == str(tmp_path)
    assert not found.error
    reported = os.statvfs(tmp_path)
    assert found.total_bytes == reported.f_blocks * reported.f_frsize
    assert list(tmp_path.iterdir()) == []
    assert probe_shared_memory().path == "/dev/shm"


def test_a_folder_that_cannot_be_written_to() -> None:
    """Not even by root."""
    check(
        judge_disk(probe_disk(Path("/proc"))), Severity.FAIL, "nothing can be written"
    )


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
)


def test_versions() -> None:
    """What is needed is there, and new enough; numbers, not letters, are compared."""
    check(judge_versions(VERSIONS), Severity.OK, "torch 2.13.0+cpu")
    old = replace(VERSIONS, needed=(RequiredPackage("torch", "2.11", "2.9.1+cu128"),))
    reported = "torch 2.9.1+cu128 (needs 2.11 or newer)"
    check(judge_versions(old), Severity.FAIL, reported, "pip install")
    none = replace(VERSIONS, needed=(RequiredPackage("typer", "", ""),))
    check(judge_versions(none), Severity.FAIL, "typer is missing")


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
