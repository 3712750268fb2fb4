"""Architectures of other libraries, captured and cut, are what they are uncut.

Outputs, gradients and buffers after four microbatches, in one, two and three stages.
The capture leaves the model as it was. A few of them run here, and all of them in
`make test-long`.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.zoo.catalogue.check import check
from tests.zoo.catalogue.entries import (
    REFUSED,
    SHORT,
    all_names,
    is_installed,
    library_of,
)
from tests.zoo.catalogue.table import EQUAL, PAGE, Outcome, outcome_of, page, results

_OTHERS = [
    pytest.param(name, marks=pytest.mark.long)
    for name in all_names()
    if name not in SHORT
]


def test_the_page_has_every_architecture() -> None:
    """If not, write both again, as tests/zoo/catalogue/table.py says."""
    assert [row["name"] for row in results()] == list(all_names())
    assert PAGE.read_text() == page()


def test_enough_are_equal() -> None:
    """At least 57 of 60; and what is not, is refused as it is to be."""
    counts = Counter(map(outcome_of, results()))

    assert counts.total() >= 60
    assert counts[Outcome.EXACT] + counts[Outcome.EQUAL] >= 57
    assert counts[Outcome.REFUSED] == len(REFUSED)
    assert counts[Outcome.OTHER] == 0


@pytest.mark.xdist_group("catalogue")
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # of other libraries about themselves
@pytest.mark.parametrize("name", [*SHORT, *_OTHERS])
def test_stages_are_the_uncut_model(name: str) -> None:
    """None is changed by the capture, and none refused but those that are to be."""
    if not is_installed(name):
        pytest.skip(f"{name} needs {library_of(name)}, which is not installed")

    row = check(name)

    if name in REFUSED:
        assert "it keeps state in state" in row.refused
        assert "Let forward take it as an argument and return it" in row.refused
        assert check(REFUSED[name]).difference == 0.0
        return
    assert row.refused == ""
    assert row.changed == ()
    assert row.difference is not None
    assert row.difference <= EQUAL
