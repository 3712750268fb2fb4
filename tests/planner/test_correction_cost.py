"""What a correction of old gradients takes is in the memory that is predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from hocket.core.costs import Costs, StageCost
from hocket.core.simulate import simulate
from hocket.planner.candidate import DDP, Candidate, Outcome
from hocket.planner.correction_cost import CorrectionCost, predicted_versions_alive
from hocket.planner.predict import Predictor
from hocket.planner.rank import Search, rank
from hocket.planner.ranking.report import to_html
from hocket.planner.replicas.data_parallel import data_parallel_outcome
from hocket.planner.work import MeasuredCosts
from hocket.schedules import make_schedule
from tests.planner.toys import MIB, cluster, work

FEEDBACK: Final = CorrectionCost("error-feedback", kept_per_delay=1, at_work=1)
PREDICTION: Final = CorrectionCost(
    "weight-prediction", kept=1, at_work=1, predicts_weights=True
)
LAYER: Final = 8 * MIB  # of weights; a device has two of them


def with_correction(correction: CorrectionCost) -> MeasuredCosts:
    """Eight equal layers."""
    return replace(work(8), correction=correction)


def predicted(correction: CorrectionCost, name: str) -> Outcome:
    """On four devices, with one or two stages on each."""
    v = 1 if name.startswith("pipedream") else 2
    m = 1 if name == "pipedream" else 4
    predictor = Predictor(with_correction(correction), cluster(4), 4)
    return predictor.outcome(Candidate(name, 4, 1, v, m))


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize(
    "name", ["pipedream", "pipedream-2bw", "wpipe", "wpipe-overlapped"]
)
def test_guesses_are_as_many_as_the_simulator_has(name: str, p: int) -> None:
    """Counted from the order of ops, and from bytes over time."""
    m = 1 if name == "pipedream" else 2 * p
    order = make_schedule(name, num_devices=p, num_microbatches=m, num_steps=2 * p + 3)
    stages = order.program.stages
    costs = Costs(
        tuple(
            StageCost(1.0, 1.0, 1.0, update_s=0.5, guess_bytes=int(stage.delay > 0))
            for stage in stages
        )
    )
    timeline = simulate(order, costs)
    counted = [
        num if stage.delay else 0
        for num, stage in zip(predicted_versions_alive(order), stages, strict=True)
    ]
    for device in range(p):  # of its stages, at most one is delayed
        own = [counted[stage] for stage in order.program.stages_on[device]]
        assert timeline.peak_bytes(device) == sum(own)


def test_error_feedback_keeps_an_update_for_each_of_the_delay() -> None:
    """PipeDream's first stage has the longest; the last one has none, nor a copy."""
    plain, fed = (predicted(x, "pipedream") for x in (CorrectionCost(), FEEDBACK))
    kept = [split.correction_bytes for split in fed.memory]
    assert kept == [2 * LAYER * delay for delay in (3, 2, 1, 0)]
    assert fed.num_versions == plain.num_versions
    assert fed.memory[3] == plain.memory[3]
    for a, b in zip(plain.memory, fed.memory, strict=True):
        assert b.optimizer_bytes == a.optimizer_bytes
        assert b.total_bytes >= a.total_bytes + b.correction_bytes


def test_guesses_are_versions() -> None:
    """WPipe's front half has one more; the back half is as it was."""
    plain, foreseen = (predicted(x, "wpipe") for x in (CorrectionCost(), PREDICTION))
    assert plain.num_versions == (2,) * 4 + (1,) * 4
    assert foreseen.num_versions == (3,) * 4 + (1,) * 4
    assert [split.version_bytes for split in foreseen.memory] == [2 * LAYER] * 4
    assert [split.correction_bytes for split in foreseen.memory] == [LAYER] * 4


def test_what_has_no_delay_has_no_correction() -> None:
    """Neither orders that flush nor plain data parallelism."""
    for name in ("1f1b", "gpipe"):
        found = [
            Predictor(with_correction(x), cluster(4), 8).outcome(
                Candidate(name, 4, 1, 1, 8)
            )
            for x in (CorrectionCost(), PREDICTION)
        ]
        assert found[0] == found[1]
    plain, other = (
        data_parallel_outcome(
            Predictor(with_correction(x), cluster(4), 8), Candidate(DDP, 1, 4, 1, 2)
        )
        for x in (CorrectionCost(), FEEDBACK)
    )
    assert plain == other


def test_what_no_longer_fits_is_not_chosen() -> None:
    """And both kinds of bytes are in the tables of orders with old weights."""
    asked = Search(
        ("pipedream-2bw", "1f1b"),
        num_devices=(4,),
        num_microbatches=(4,),
        recompute=(False,),
        data_parallel=False,
        max_delay=1,
    )
    plain = rank(with_correction(CorrectionCost()), cluster(4), 4, asked)
    assert plain.best is not None
    assert plain.best.candidate.schedule == "pipedream-2bw"
    just_enough = cluster(4, memory_bytes=plain.best.peak_bytes)
    found = rank(with_correction(FEEDBACK), just_enough, 4, asked)
    assert found.best is not None
    assert found.best.candidate.schedule == "1f1b"
    text = str(rank(with_correction(FEEDBACK), cluster(4), 4, asked))
    assert "error-feedback MiB" in text
    assert "error-feedback" not in str(plain)
    page = to_html(rank(with_correction(FEEDBACK), cluster(4), 4, asked))
    assert "error-feedback MiB" in page
