"""SQuAD's measures are those of its official scripts."""

from __future__ import annotations

import pytest

from hocket.recipes.objectives.spans import exact_match, f1


@pytest.mark.parametrize(
    ("found", "answers", "exact", "words"),
    [
        ("Denver Broncos", ["Denver Broncos"], 1.0, 1.0),
        ("the DENVER  broncos!", ["Denver Broncos", "no"], 1.0, 1.0),
        ("Broncos", ["Denver Broncos"], 0.0, 2 / 3),
        ("Broncos", ["no", "Denver Broncos", "the Broncos"], 1.0, 1.0),
        ("to to be", ["to be or"], 0.0, 2 / 3),  # each word as often as in both
        ("an", ["Denver"], 0.0, 0.0),
        ("", [], 1.0, 1.0),  # rightly no answer
        ("Denver", [], 0.0, 0.0),
        ("", ["Denver"], 0.0, 0.0),
    ],
)
def test_scores(found: str, answers: list[str], exact: float, words: float) -> None:
    """Case, punctuation, articles and spaces do not count; the best answer does."""
    assert exact_match(found, answers) == exact
    assert f1(found, answers) == pytest.approx(words)
