"""Real data, where there are some beside the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

FOLDER: Final = Path(__file__).parents[4] / "shared" / "data"


def real(name: str) -> Path:
    """A folder of real data; the test is skipped where there is none."""
    folder = FOLDER / name
    if not folder.is_dir():
        pytest.skip(f"no {name} beside the repository")
    return folder
