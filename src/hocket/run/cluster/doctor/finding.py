"""The result of one check of the doctor.

Every check is two functions: a probe that measures and decides nothing, and a judge
that turns the measurement into a finding and measures nothing.

    probe() ──▶ observation, plain numbers ──▶ judge() ──▶ Finding
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from hocket.run.diagnostics.job_folder import Json


class Severity(Enum):
    """How much a finding matters for training."""

    OK = "ok"
    WARN = "warn"  # training will run, slower than it could, or not everywhere
    FAIL = "fail"  # training will not run


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result.

    Args:
        check: the check's name.
        severity: whether training suffers from it.
        found: the observation, with the numbers, in one sentence.
        mend: the way to fix it; empty if nothing is wrong.
        numbers: the same as data.
        host: the host on which it was found; empty if it concerns the whole job.
    """

    check: str
    severity: Severity
    found: str
    mend: str = ""
    numbers: Mapping[str, Json] = field(default_factory=dict)
    host: str = ""

    def to_json(self) -> dict[str, Json]:
        """Return the finding as JSON can hold it."""
        return asdict(self) | {"severity": self.severity.value}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Finding:
        """Read what `to_json` returned."""
        return cls(**{**fields, "severity": Severity(fields["severity"])})


def worst(findings: Iterable[Finding]) -> Severity:
    """Return the highest severity among findings.

    >>> worst([Finding("disk", Severity.WARN, ""), Finding("load", Severity.OK, "")])
    <Severity.WARN: 'warn'>
    """
    order = list(Severity)
    return max((finding.severity for finding in findings), key=order.index)
