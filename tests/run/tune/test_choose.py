"""`schedule="auto"`: the same order on every worker, the fastest that fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from hocket.core.costs import Link
from hocket.planner.cluster import MessageCosts
from hocket.planner.rank import Search, rank
from hocket.planner.ranking.table import sentence
from hocket.run.cluster.layout import Layout
from hocket.run.cluster.world import join_world
from hocket.run.tune.choose import chosen, may_reverse, playable
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.cut import cut_model
from tests.planner.toys import cluster, work
from tests.run.support.forked import run_forked
from tests.run.support.started import started

MODULE = "tests.run.tune.test_choose"


def model() -> nn.Sequential:
    """Eight equal layers, the same on every worker."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over samples."""
    return nn.functional.mse_loss(output, targets)


def train(memory_bytes: int | None, stages_per_device: int | None) -> list[Any]:
    """One step of an order that the planner chose; a worker's entry.

    Messages are said to take a second.
    """
    torch.set_num_threads(1)
    torch.manual_seed(1)
    batch = (torch.randn(16, 64), torch.randn(16, 64))
    slow = MessageCosts(Link(latency_s=1.0), Link())
    with (
        patch.object(cut_model, "measure_messages", return_value=slow) as measured,
        started(
            model(),
            loss,
            (lambda p: torch.optim.AdamW(p, 1e-3)),
            batch,
            schedule="auto",
            num_microbatches=4,
            stages_per_device=stages_per_device,
            memory_bytes=memory_bytes,
            world=join_world(),
        ) as pipeline,
    ):
        assert measured.call_count == 1
        result = pipeline.step(batch)
        schedule = pipeline.plan.schedule
        return [str(schedule), schedule.program.num_stages, result.loss]


def test_all_workers_play_the_same_order(tmp_path: Path) -> None:
    """And the step is that of the plain loop.

    Where messages take long, several stages per device do not pay.
    """
    done = run_forked(f"{MODULE}:train", None, None, folder=tmp_path, timeout_s=30)
    assert set(done.codes.values()) == {0}, done.output
    first, other = done.results.values()
    assert other == first
    _, num_stages, value = first
    assert num_stages == 2
    torch.manual_seed(1)
    inputs, targets = torch.randn(16, 64), torch.randn(16, 64)
    assert abs(value - float(loss(model()(inputs), targets).detach())) < 1e-6


def test_the_user_may_choose_the_stages(tmp_path: Path) -> None:
    """Two per device leave the interleaved orders to choose from."""
    done = run_forked(f"{MODULE}:train", None, 2, folder=tmp_path, timeout_s=30)
    assert set(done.codes.values()) == {0}, done.output
    assert all(result[1] == 4 for result in done.results.values())


def test_orders_that_split_backwards_are_among_the_choices() -> None:
    """Whether they are chosen depends on what halves of these layers take."""
    split = {"zb-auto", "zb-h1", "zb-h2", "zb-v", "interleaved-zb", "dualpipe-v"}
    assert split <= set(playable(Layout(0, 2, 1), 4, 0))


@pytest.mark.parametrize(("bytes_per_s", "is_reversed"), [(1e8, True), (1e13, False)])
def test_reverse_first_k_is_chosen_where_reductions_take_long(
    bytes_per_s: float, *, is_reversed: bool
) -> None:
    """And names k and its buckets; on a fast link what ends each step is as fast."""
    search = Search(
        schedules=("gpipe", "1f1b", "reverse-first-k"),
        num_devices=(1,),
        num_microbatches=(1,),
        data_parallel=False,
    )
    ranking = rank(work(8), cluster(4, bytes_per_s=bytes_per_s), 32, search)
    name, _ = chosen(ranking)
    assert (name == "reverse-first-k") == is_reversed
    found = next(x for x in ranking.fitting if x.buckets is not None)
    assert found.buckets is not None
    num = len(found.boundaries) + 1
    assert len(found.buckets.gradient_bytes) == num
    named = f"the first {found.buckets.k} of {num} gradient bucket"
    assert named in sentence(found, ranking)


def test_reverse_first_k_is_for_replicas_of_one_device() -> None:
    """One microbatch, and nothing that needs the end of a step."""
    config = PipelineConfig(
        model(),
        loss,
        optimizer=torch.optim.SGD,
        example=None,
        num_microbatches=1,
        num_replicas=2,
    )
    one, two = Layout(0, 1, 2), Layout(0, 2, 2)
    assert may_reverse(config, one)
    assert not may_reverse(config, two)
    for refused in ({"num_microbatches": 2}, {"clip_norm": 1.0}, {"accumulate": 2}):
        assert not may_reverse(replace(config, **refused), one)


def test_an_order_that_does_not_fit_is_refused_on_every_worker(tmp_path: Path) -> None:
    """With what it takes, and what there is."""
    done = run_forked(f"{MODULE}:train", 1000, None, folder=tmp_path, timeout_s=30)
    assert set(done.codes) == set(done.reports)
    for report in done.reports.values():
        assert "no order fits" in str(report)


def test_old_weights_are_among_the_choices_only_where_they_are_allowed() -> None:
    """By default none; PipeDream's are up to three updates old on four devices."""
    layout = Layout(0, 4, 1)
    flush_free = {"pipedream-2bw", "wpipe", "wpipe-overlapped"}

    assert not flush_free & set(playable(layout, 8, 0))
    assert set(playable(layout, 8, 1)) - set(playable(layout, 8, 0)) == flush_free
    assert set(playable(layout, 1, 3)) - set(playable(layout, 1, 1)) == {"pipedream"}
