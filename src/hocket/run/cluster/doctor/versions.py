"""Checks that the software is what hocket needs, and the same on every host."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from hocket.run.cluster.doctor.finding import Finding, Severity
from hocket.version import __version__


@dataclass(frozen=True, slots=True)
class RequiredPackage:
    """A package that hocket needs.

    Args:
        name: the package's name.
        least: the oldest version that works; empty for any.
        installed: the installed version; empty if there is none.
    """

    name: str
    least: str
    installed: str


@dataclass(frozen=True, slots=True)
class SoftwareVersions:
    """The versions of the software in this process.

    Args:
        hocket: hocket's version.
        torch: torch's version.
        python: Python's version.
        needed: the packages that hocket needs.
    """

    hocket: str
    torch: str
    python: str
    needed: tuple[RequiredPackage, ...]


def probe_versions() -> SoftwareVersions:
    """Read the versions of the installed packages."""
    return SoftwareVersions(
        hocket=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        needed=tuple(_needed()),
    )


def judge_versions(versions: SoftwareVersions) -> Finding:
    """Check that all packages are there, and new enough."""
    found = (
        f"hocket {versions.hocket}, torch {versions.torch}, Python {versions.python}"
    )
    faults = [
        f"{one.name} {one.installed or 'is missing'}"
        + (f" (needs {one.least} or newer)" if one.least else "")
        for one in versions.needed
        if not one.installed or _numbers(one.installed) < _numbers(one.least)
    ]
    if not faults:
        return Finding("versions", Severity.OK, found, numbers=asdict(versions))
    return Finding(
        "versions",
        Severity.FAIL,
        f"{found}; {', '.join(faults)}",
        "`pip install --upgrade hocket` into the environment that runs",
        asdict(versions),
    )


def judge_same_versions(by_rank: Sequence[Mapping[str, Any]]) -> Finding:
    """Check that all workers run the same software.

    Args:
        by_rank: `asdict(SoftwareVersions)` of each rank.
    """
    check, first = "same versions", by_rank[0]
    for rank, other in enumerate(by_rank):
        for what in ("hocket", "torch", "python"):
            if _numbers(str(other[what]))[:2] != _numbers(str(first[what]))[:2]:
                return Finding(
                    check,
                    Severity.WARN if what == "python" else Severity.FAIL,
                    f"{what} is {first[what]} at rank 0 and {other[what]} at rank "
                    f"{rank}: messages and results may differ",
                    f"install the same {what} on every host",
                )
    return Finding(check, Severity.OK, f"all {len(by_rank)} workers run the same")


def _needed() -> list[RequiredPackage]:
    try:
        wanted = metadata.requires("hocket") or []
    except metadata.PackageNotFoundError:  # run from its sources
        return []
    needed = []
    for line in wanted:
        if "extra ==" in line:
            continue
        found = re.match(r"([\w.-]+)(?:\s*>=\s*([\d.]+))?", line)
        assert found is not None, line
        needed.append(RequiredPackage(found[1], found[2] or "", _installed(found[1])))
    return needed


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version's leading numbers: `2.13.0+cpu` is `(2, 13, 0)`."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
