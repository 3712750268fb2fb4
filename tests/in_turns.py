"""All combinations of parameters, of which `make test` has each pair of values."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def in_turns(*parameters: Iterable[Any]) -> list[Any]:
    """Return all combinations; those in odd places of the chessboard are long.

    With three parameters or more, each value of one still meets each of another.

    Args:
        parameters: the values of each; two at least.
    """
    return [
        pytest.param(
            *(value for _, value in places),
            marks=[pytest.mark.long] if sum(i for i, _ in places) % 2 else [],
        )
        for places in product(*map(enumerate, parameters))
    ]
