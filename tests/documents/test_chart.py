"""The chart of schedules names what there is, and its reasons hold."""

from __future__ import annotations

import runpy
from typing import Final

import pytest

import hocket
from hocket.options import CAPTURED_STEP
from hocket.planner.candidate import DDP, FSDP
from tests.documents.blocks import ROOT

CHART: Final = runpy.run_path(str(ROOT / "docs/images/chart.py"))["CHART"]
OTHERS: Final = {CAPTURED_STEP, DDP.upper(), FSDP.upper(), "auto, with teachers="}
COSTS: Final = hocket.Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1)


def timeline_of(name: str, p: int) -> hocket.Timeline:
    """One step with twice as many microbatches as devices."""
    order = hocket.make_schedule(name, num_devices=p, num_microbatches=2 * p)
    return hocket.simulate(order, COSTS)


def held(timeline: hocket.Timeline, p: int) -> float:
    """The most activations on any device."""
    return max(timeline.peak_activations(device) for device in range(p))


def test_every_answer_can_be_asked_for() -> None:
    """As a schedule's name, or one of those that the planner has beside them."""
    named = {name for question in CHART for _, name, _ in question.answers}
    assert named <= {*hocket.SCHEDULES, *OTHERS}


@pytest.mark.parametrize("p", [4, 8, 16])
def test_its_reasons_hold(p: int) -> None:
    """What it says of bubbles and memory beside 1F1B, for equal devices."""
    made = {
        name: timeline_of(name, p)
        for name in ("1f1b", "zb-v", "v-half", "v-min", "zb-h1")
    }
    bubble = {x: made[x].bubble_fraction * made[x].makespan_s for x in made}
    held_by = {name: held(made[name], p) / held(made["1f1b"], p) for name in made}

    assert bubble["zb-v"] < bubble["1f1b"] / 4
    assert bubble["v-half"] <= bubble["1f1b"] / 2 + 1e-9
    assert bubble["v-min"] < bubble["1f1b"]
    assert bubble["zb-h1"] == pytest.approx(bubble["1f1b"] / 3)
    assert held_by["zb-v"] == held_by["zb-h1"] == 1
    assert held_by["v-half"] <= 0.5 + 1 / p
    assert held_by["v-min"] <= 1 / 3 + 2 / p / 3 + 1 / p
