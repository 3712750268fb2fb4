"""Stages, run one after the other, are the uncut model: outputs, gradients, buffers."""

from __future__ import annotations

import pytest

from tests.model.support.small_models import CASES, captured_case
from tests.model.support.stages_by_hand import worst_difference

# Where several stages, or several calls, add to one gradient, the order of the
# additions is another than in one backward; and torch's own encoder has one kernel of
# its own for evaluation. Everywhere else not a bit may differ.
ROUNDED = (
    *("pairs", "odd", "query", "experts", "repeated"),
    *("gpt2-sdpa", "gpt2-eager", "encoder"),
)


@pytest.mark.parametrize("name", CASES)
def test_stages_are_the_uncut_model(name: str) -> None:
    """After four microbatches, two of them smaller, and in evaluation; with dropout."""
    case, captured = captured_case(name)

    worst = {n: worst_difference(case, captured, n) for n in (1, 2, 3, 4)}

    allowed = 1e-13 if name in ROUNDED else 0.0
    assert max(worst.values()) <= allowed, worst
