"""The page of what hocket is tested with says what the tests hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tested_with import seen_page
from tests.tested_with.count import num_cases
from tests.tested_with.page import PAGE, page


def test_the_page_is_what_the_script_writes() -> None:
    """If not, write it again: python -m tests.tested_with.page."""
    assert PAGE.read_text() == page()


def test_the_table_of_the_law_is_what_the_script_writes() -> None:
    """The same command writes it."""
    assert seen_page.PAGE.read_text() == seen_page.seen_page()


@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize(("b", "c"), [(1, 1), (2, 2)])
@settings(max_examples=7)
@given(d=st.integers())
def drawn(a: int, b: int, c: int, d: int) -> None:
    """Two parameters, and examples."""


def test_cases_are_parameters_times_examples() -> None:
    """As pytest collects them, and hypothesis draws."""
    place = "tests/tested_with/test_page.py"

    assert num_cases(f"{place}::drawn") == 3 * 2 * 7
    assert num_cases(f"{place}::test_cases_are_parameters_times_examples") == 1
