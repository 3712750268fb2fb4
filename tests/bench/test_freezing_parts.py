"""Parts of bench/freezing: what is measured later continues what was before."""

from __future__ import annotations

from bench.freezing.parts import joined
from bench.freezing.table import followed_s


def test_rounds_continue_those_before() -> None:
    """A round that is measured again replaces itself and what came behind it."""
    first = {"case": "a", "runs": {"x": [1], "y": [2]}}
    second = joined({"case": "a", "runs": {"x": [3], "y": [4]}}, first, "runs", 1)
    assert second["runs"] == {"x": [1, 3], "y": [2, 4]}
    assert joined({"case": "a", "runs": {"x": [5]}}, second, "runs", 0)["runs"] == {
        "x": [5]
    }
    assert joined(first, None, "runs", 0) == first


def test_an_epoch_is_late_as_the_one_before_was() -> None:
    """By hand: 4 s; 3 + (5 - 4) s; 2 + (3.5 - 3) s."""
    ran = {"epochs_predicted_s": [4.0, 3.0, 2.0], "epochs_s": [5.0, 3.5, 2.25]}
    assert followed_s(ran) == 4.0 + 4.0 + 2.5
