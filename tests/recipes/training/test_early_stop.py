"""Early stopping: a pure function from evaluations to a decision."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import DataError
from hocket.recipes.config.sections import TrainingSettings
from hocket.recipes.training.saving import EarlyStop
from hocket.run.data.metrics import EvaluationResult

values = st.lists(st.floats(-10, 10), max_size=20)
patiences = st.integers(1, 5)


def evaluation(value: float) -> EvaluationResult:
    """One that came to this loss, and to twice this score."""
    return EvaluationResult(value, {"loss": value}, {"score": 2 * value}, 4)


def patient(patience: int | None, goal: str | None = None) -> TrainingSettings:
    """Stops by the loss, or by the score if a goal is given."""
    scored = {} if goal is None else {"stop_metric": "score", "stop_goal": goal}
    return TrainingSettings.model_validate({"stop_patience": patience, **scored})


def stops(
    training: TrainingSettings, series: list[float], stop: EarlyStop | None = None
) -> list[bool]:
    """What it says after each of some evaluations."""
    stop = stop or EarlyStop()
    return [stop.stops_after(evaluation(value), training) for value in series]


@given(series=values, patience=patiences)
def test_stops_after_so_many_without_a_better_one(
    series: list[float], patience: int
) -> None:
    """Compared with the definition: how long ago was the lowest, first time?"""
    for length, said in enumerate(stops(patient(patience), series), start=1):
        seen = series[:length]
        ago = length - 1 - seen.index(min(seen))
        assert said == (ago >= patience)
    assert not any(stops(patient(None), series))


@given(series=values, patience=patiences)
def test_the_highest_of_a_metric_is_the_lowest_of_its_negative(
    series: list[float], patience: int
) -> None:
    """Both goals are one."""
    highest, lowest = (patient(patience, goal) for goal in ("highest", "lowest"))
    assert stops(highest, series) == stops(lowest, [-value for value in series])


@given(series=values, patience=patiences, cut=st.integers(0, 20))
def test_goes_on_where_a_checkpoint_was_made(
    series: list[float], patience: int, cut: int
) -> None:
    """Two halves say what the whole would."""
    training, first = patient(patience), EarlyStop()
    said = stops(training, series[:cut], first)
    second = EarlyStop(**json.loads(json.dumps(asdict(first))))
    whole = stops(training, series)
    assert said + stops(training, series[cut:], second) == whole


def test_what_is_no_number_is_not_better() -> None:
    """A loss that blew up is no progress, also as the first one."""
    assert stops(patient(2), [nan, nan]) == [False, True]
    assert stops(patient(2), [inf, nan, 1.0, nan]) == [False, False, False, False]


def test_an_unknown_metric_names_those_that_there_are() -> None:
    """At the first evaluation, which alone knows."""
    training = TrainingSettings(stop_patience=1, stop_metric="f1")
    with pytest.raises(DataError, match=r"'f1'.*there are 'loss', 'score'"):
        stops(training, [1.0])
