"""Overlapping steps and several lanes train to the emulator's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tests.run.support.forked import answers_of

CASES: Final[dict[str, dict[str, Any]]] = {
    "halves": {"schedule": "wpipe", "splits": True},
    "halves, one delay": {"schedule": "pipedream-2bw", "splits": True},
    "overlapped halves": {"schedule": "wpipe-overlapped", "splits": True},
    "clipping": {"schedule": "wpipe", "clip_norm": 0.1},
    "compiled halves": {"schedule": "wpipe", "splits": True, "compile": True},
    "a lane for W": {"schedule": "1f1b", "splits": True, "aside": True},
    "two stages, a lane for W": {
        "schedule": "interleaved-1f1b",
        "splits": True,
        "aside": True,
    },
}


COMPILED: Final = {"compiled": {"schedule": "pipedream-2bw", "compile": True}}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "cases", [CASES, pytest.param(COMPILED, marks=pytest.mark.long)], ids=["", "whole"]
)
def test_equals_the_emulator(cases: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Weights and losses, on both of two workers; compiled code rounds differently."""
    for answer in answers_of(
        "overlapping_workers:train_all", cases, folder=tmp_path / "job"
    ):
        assert list(answer) == list(cases)
        for name, difference in answer.items():
            assert difference <= (1e-12 if "compiled" in name else 0.0), name
