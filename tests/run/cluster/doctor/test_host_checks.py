"""The doctor on one host: what each check makes of what it saw, and that it sees."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Final

import pytest
import torch

import hocket
from hocket.run.cluster.doctor.examine import (
    DEFAULT_PORT,
    Ports,
    judge_default_port,
    judge_free_ports,
    probe_ports,
)
from hocket.run.cluster.doctor.finding import Finding, Severity, worst
from hocket.run.cluster.doctor.versions import (
    RequiredPackage,
    SoftwareVersions,
    judge_same_versions,
    judge_versions,
    probe_versions,
)


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
