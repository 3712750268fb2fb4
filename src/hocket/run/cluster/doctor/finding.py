"""What one check of the doctor says.

Every check is two functions: a probe that looks (and decides nothing), and a judge from
what was seen to a finding (and looks at nothing).

    probe() ──▶ observation, plain numbers ──▶ judge() ──▶ Finding
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from hocket.run.diagnostics.job_folder import Json


class Verdict(Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"  # training will run, slower than it could, or not everywhere
    FAIL = "fail"  # training will not run


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result.

    Args:
        check: its name.
        verdict: how bad it is.
        found: what was seen, with the numbers, in one sentence.
        mend: what to do about it; empty where nothing need be done.
        numbers: the same as data.
        host: where it was found; empty for what concerns all.
    """

    check: str
    verdict: Verdict
    found: str
    mend: str = ""
    numbers: Mapping[str, Json] = field(default_factory=dict)
    host: str = ""

    def to_json(self) -> dict[str, Json]:
        """As JSON can hold it."""
        return asdict(self) | {"verdict": self.verdict.value}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Finding:
        """What `to_json` gave."""
        return cls(**{**told, "verdict": Verdict(told["verdict"])})


def worst(findings: Iterable[Finding]) -> Verdict:
    """The verdict on all of them.

    >>> worst([Finding("disk", Verdict.WARN, ""), Finding("load", Verdict.OK, "")])
    <Verdict.WARN: 'warn'>
    """
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index)
