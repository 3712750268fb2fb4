"""Networks of published experiments by name: planned without a model."""

from __future__ import annotations

import pytest

from bench.ooo_pipeline.experiments import EXPERIMENTS
from hocket.errors import PlanError
from hocket.planner.published.catalogue import NETWORKS, plan_network
from hocket.planner.rank import PlanConfig, Search

PIPELINE_NETWORKS = (
    *("bert-12", "bert-24", "bert-36", "bert-48"),
    *("gpt3-medium", "rnn-16", "ffnn-16"),
)


def test_every_pipeline_network_has_a_name() -> None:
    """All seven; and what an experiment trains is what a plan is made for."""
    assert set(PIPELINE_NETWORKS) <= set(NETWORKS)
    planned = {entry.make() for entry in NETWORKS.values()}
    assert {experiment.layers for experiment in EXPERIMENTS} <= planned


@pytest.mark.parametrize("name", ["bert-24", "rnn-16", "ffnn-16"])
def test_split_backwards_beat_gpipe_on_four_devices(name: str) -> None:
    """With the fine-tuning experiment's four microbatches."""
    search = Search(
        schedules=("gpipe", "ooo-fast-forward", "ooo-modulo"),
        num_devices=(4,),
        num_microbatches=(4,),
        recompute=(False,),
        data_parallel=False,
    )
    ranking = plan_network(
        name, PlanConfig(num_devices=4, hardware="v100-16g", search=search)
    )
    best: dict[str, float] = {}
    for outcome in ranking.fitting:
        best.setdefault(outcome.candidate.schedule, outcome.step_s)

    assert best["ooo-fast-forward"] < best["gpipe"]
    assert ranking.batch_size == NETWORKS[name].batch_size


@pytest.mark.parametrize(
    ("name", "hardware", "words"),
    [
        ("bert-25", "v100-16g", "no network is named 'bert-25'"),
        ("bert-24", None, "--hardware v100-16g"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    name: str, hardware: str | None, words: str
) -> None:
    """With the way out."""
    with pytest.raises(PlanError, match=words):
        plan_network(name, PlanConfig(num_devices=4, hardware=hardware))
