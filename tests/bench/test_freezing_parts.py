"""Parts of bench/freezing: what is measured later continues what was before."""

from __future__ import annotations

from bench.freezing.cases import BASE
from bench.freezing.parts import is_measured, joined
from bench.freezing.table import (
    at_its_speed_s,
    followed_s,
    forwards,
    predicted,
    times_as_fast,
    whole_s,
)


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


def test_a_slower_machine_is_no_error_of_the_prediction() -> None:
    """By hand: a probe of 2 s before took 2, 4 and 4 s beside the two epochs.

    So they were expected to take 1.5 and 2 times as long.
    """
    ran = {
        "known_probe_s": 2.0,
        "probes_s": [2.0, 4.0, 4.0],
        "epochs_predicted_s": [8.0, 4.0],
    }
    assert at_its_speed_s(ran) == 1.5 * 8.0 + 2.0 * 4.0


def test_runs_that_were_not_probed_stay_in_the_table() -> None:
    """Without what is not known of them; errors are the median, and the extremes."""
    ran = {
        "seconds": 10.0,
        "transitions_s": [1.0],
        "predicted_s": 9.9,
        "epochs_s": [2.0] * 5,
        "epochs_predicted_s": [2.0] * 5,
        "ends_s": [[2.0 * n, 10.0 - 2.0 * n] for n in range(1, 6)],
    }
    by_round = {"0": ran}
    rows = [{"case": "a", "contestants": {"x": by_round, "y": {}}}]
    head, row = predicted(rows)
    assert len(head) == len(row)
    assert row[2:6] == ["9.0 s", "9.9 s", "+10.0 %", "–"]
    assert row[-3:] == ["+0.0 %"] * 3
    by_round["1"] = {**ran, "predicted_s": 8.1}
    assert predicted(rows)[1][2:6] == ["9.0 s", "9.0 s", "+0.0 % (-10.0 to +10.0)", "–"]


def test_a_forward_beside_reading() -> None:
    """Images a second, and times as fast from memory and from disk."""
    names = {"computed": 200.0, "read from memory": 10.0, "read from disk": 20.0}
    found = {name: {"median_ms": ms} for name, ms in names.items()}
    row = {"case": "a", "batch_size": 64, "bytes_per_sample": 25_000, **found}
    assert forwards([row])[1] == [
        *("a", "64", "200 ms", "320", "10.0 ms", "20.0 ms", "**20**, 10", "25.0 kB")
    ]
