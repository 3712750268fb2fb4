"""The pictures in docs/images are what the library draws today."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Final

import pytest

IMAGES: Final = Path(__file__).parent.parent.parent / "docs" / "images"
PICTURES: Final[dict[str, str]] = runpy.run_path(str(IMAGES / "make.py"))["pictures"]()


DRAWN_BY_BENCHMARKS: Final = {
    "flush-free-steps.svg",
    "idle-shares.svg",
    "ooo-pipeline.svg",
    "staleness.svg",
    "wpipe.svg",
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_up_to_date(name: str) -> None:
    """If this fails and the new picture is right: `python docs/images/make.py`."""
    assert (IMAGES / name).read_text(encoding="utf-8") == PICTURES[name]


def test_no_picture_is_left_behind() -> None:
    """Every picture in the folder is one that the code draws."""
    there = {path.name for path in IMAGES.glob("*.svg")}
    assert there - DRAWN_BY_BENCHMARKS == set(PICTURES)
