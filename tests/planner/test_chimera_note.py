"""Chimera, priced beside a plan's pipelines: closed forms, and when it is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hocket.core.costs import StageCost
from hocket.planner.candidate import Candidate
from hocket.planner.predict import Predictor
from hocket.planner.ranking.notes import chimera_sentence, chimera_step
from hocket.schedules import SCHEDULES, Shape
from tests.planner.toys import MIB, cluster, work


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 8), (8, 8)])
def test_its_step_is_the_closed_form(p: int, m: int) -> None:
    """All work, and the bubble of its entry in the table; messages cost nothing."""
    predictor = Predictor(work(8), cluster(p, bytes_per_s=float("inf")), m)
    stage_s = 0.01 * 8 / p
    share = StageCost(
        forward_s=2 * stage_s, input_grad_s=2 * stage_s, weight_grad_s=2 * stage_s
    )
    bubble_s = SCHEDULES["chimera"].bubble_s(Shape(p, m, 2), share)
    step_s, _ = chimera_step(predictor, Candidate("gpipe", p, 1, 1, m))

    assert step_s == pytest.approx(m * 3 * stage_s + bubble_s)


def test_it_holds_all_weights_twice() -> None:
    """Two copies of eight layers on four devices: four layers each."""
    predictor = Predictor(work(8, activation_bytes=0), cluster(4), 4)
    _, peak_bytes = chimera_step(predictor, Candidate("gpipe", 4, 1, 1, 4))

    assert peak_bytes >= 4 * 4 * 8 * MIB  # weight, gradient and two states of each


def test_a_plan_prices_it_and_says_what_runs_it() -> None:
    """Beside the fastest pipeline; nothing is said where it does not take the numbers.

    It needs an even number of devices.
    """
    predictor = Predictor(work(12), cluster(4), 12)
    gpipe = predictor.outcome(Candidate("gpipe", 4, 1, 1, 4))
    alone = replace(gpipe, candidate=replace(gpipe.candidate, schedule="ddp"))
    odd = Predictor(work(12), cluster(3), 12)

    text = chimera_sentence(predictor, [gpipe])
    assert "(with ProgramRun)" in text
    assert "times that of gpipe" in text
    assert chimera_sentence(odd, [odd.outcome(Candidate("gpipe", 3, 1, 1, 4))]) == ""
    assert chimera_sentence(predictor, [alone]) == ""
