"""Early stopping: a pure function from evaluations to a decision."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import ConfigError, DataError
from hocket.run.callbacks.early_stop import EarlyStop, Goal
from hocket.run.data.metrics import EvaluationResult
from tests.run.support.step_results import step_result

values = st.lists(st.floats(-10, 10), max_size=20)


def evaluation(value: float) -> EvaluationResult:
    """One that came to this loss, and to twice this score."""
    return EvaluationResult(value, {"loss": value}, {"score": 2 * value}, 4)


def stops(stop: EarlyStop, series: list[float]) -> list[bool]:
    """What it says after each of some evaluations, with steps between."""
    said = []
    for value in series:
        assert not stop(step_result(), None)
        said.append(stop(step_result(), evaluation(value)))
    return said


@given(series=values, patience=st.integers(1, 5))
def test_stops_after_so_many_without_a_better_one(
    series: list[float], patience: int
) -> None:
    """Compared with the definition: how long ago was the lowest, first time?"""
    for length, said in enumerate(stops(EarlyStop(patience), series), start=1):
        seen = series[:length]
        ago = length - 1 - seen.index(min(seen))
        assert said == (ago >= patience)


@given(series=values, patience=st.integers(1, 5))
def test_the_highest_of_a_metric_is_the_lowest_of_its_negative(
    series: list[float], patience: int
) -> None:
    """Both goals are one."""
    highest = EarlyStop(patience, "score", Goal.HIGHEST)
    lowest = EarlyStop(patience, "score", "lowest")
    assert stops(highest, series) == stops(lowest, [-value for value in series])


@given(series=values, patience=st.integers(1, 5), cut=st.integers(0, 20))
def test_goes_on_where_a_checkpoint_was_made(
    series: list[float], patience: int, cut: int
) -> None:
    """Two halves say what the whole would."""
    whole = stops(EarlyStop(patience), series)
    first, second = EarlyStop(patience), EarlyStop(patience)
    said = stops(first, series[:cut])
    second.load_state_dict(first.state_dict())
    assert said + stops(second, series[cut:]) == whole


def test_what_is_no_number_is_not_better() -> None:
    """A loss that blew up is no progress, also as the first one."""
    assert stops(EarlyStop(2), [nan, nan]) == [False, True]
    assert stops(EarlyStop(2), [inf, nan, 1.0, nan]) == [False, False, False, False]


def test_an_unknown_metric_names_those_that_there_are() -> None:
    """At the first evaluation, which alone knows."""
    with pytest.raises(DataError, match=r"'f1'.*there are 'loss', 'score'"):
        EarlyStop(1, "f1")(step_result(), evaluation(1.0))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"patience": 0}, "patience=0 would stop at the first"),
        ({"patience": 1, "goal": "lower"}, "'lower' is none of lowest and highest"),
    ],
)
def test_refuses_what_it_could_not_follow(settings: dict[str, Any], said: str) -> None:
    """No patience, and a goal that is none."""
    with pytest.raises(ConfigError, match=said):
        EarlyStop(**settings)
