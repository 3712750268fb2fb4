"""Parts of bench/freezing: what is measured later continues what was before."""

from __future__ import annotations

from bench.freezing.cases import BASE
from bench.freezing.parts import is_measured, joined
from bench.freezing.table import followed_s, times_as_fast, whole_s


def test_rounds_continue_those_before() -> None:
    """In order; one that is measured again replaces itself, and others stay."""
    first = joined({"case": "a", "runs": {"x": 1, "y": 2}}, None, "runs", 1)
    assert first == {"case": "a", "runs": {"x": {"1": 1}, "y": {"1": 2}}}
    second = joined({"case": "a", "runs": {"x": 3, "z": 4}}, first, "runs", 0)
    assert second["runs"] == {"x": {"0": 3, "1": 1}, "y": {"1": 2}, "z": {"0": 4}}
    again = joined({"case": "a", "runs": {"x": 5}}, second, "runs", 1)
    assert again["runs"]["x"] == {"0": 3, "1": 5}
    assert is_measured(second, "runs", ["x", "y"], 1)
    assert not is_measured(second, "runs", ["x", "z"], 1)
    assert not is_measured(None, "runs", ["x"], 0)


def test_runs_are_compared_with_the_base_of_their_own_round() -> None:
    """Of rounds that it has none of, nothing is said."""
    times = {BASE: {"0": 4.0, "2": 9.0}, "other": {"0": 2.0, "1": 1.0, "2": 3.0}}
    runs = {
        name: {number: {"seconds": s} for number, s in own.items()}
        for name, own in times.items()
    }
    assert times_as_fast({"contestants": runs}, "other") == 2.5  # of 2 and 3


def test_a_run_is_predicted_from_what_passed_and_what_is_left() -> None:
    """After the first epoch, and after the second."""
    ran = {"ends_s": [[2.0, 7.0], [3.5, 5.0]]}
    assert (whole_s(ran, 1), whole_s(ran, 2)) == (9.0, 8.5)


def test_an_epoch_is_late_as_the_one_before_was() -> None:
    """By hand: 4 s; 3 + (5 - 4) s; 2 + (3.5 - 3) s."""
    ran = {"epochs_predicted_s": [4.0, 3.0, 2.0], "epochs_s": [5.0, 3.5, 2.25]}
    assert followed_s(ran) == 4.0 + 4.0 + 2.5
