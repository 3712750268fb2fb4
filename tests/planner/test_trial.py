"""Cuts that were played: what they say of themselves, and of others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hocket.core.costs import Costs, Link, StageCost
from hocket.planner.candidate import DDP, FSDP, ZERO_1, Candidate
from hocket.planner.predict import Predictor
from hocket.planner.replicas.data_parallel import data_parallel_outcome
from hocket.planner.stages import MeasuredTrials, Trial, nearest
from tests.planner.toys import MIB, cluster, work

SLOWER = 1.25  # than the sum of layers that were measured alone
GIB_PER_S = Link(bytes_per_s=2**30)


def trial(num_samples: int, num_devices: int, num_stages: int) -> Trial:
    """Of the toy's eight layers, in equal stages."""
    num_layers = 8 // num_stages
    each_s = SLOWER * 0.01 * num_samples * num_layers
    cost = StageCost(each_s, each_s, each_s, update_s=0.5)
    return Trial(
        num_samples,
        num_devices,
        tuple(range(num_layers, 8, num_layers)),
        Costs((cost,) * num_stages, link=Link(2e-3), op_s=1e-3),
    )


def predictor(*cuts: Trial, ddp_s: float | None = None) -> Predictor:
    """Of the toy, on two devices, for eight samples."""
    return Predictor(
        work(8, update_s_per_byte=1e-9),
        cluster(2, bytes_per_s=2**30),
        8,
        MeasuredTrials(cuts, ddp_s),
    )


def test_the_size_of_a_microbatch_counts_most_then_the_devices() -> None:
    """A cut into twice the stages says more than a microbatch twice as large."""
    cuts = [trial(4, 1, 1), trial(4, 2, 4), trial(8, 2, 2)]
    assert nearest(cuts, 4, 2, 2) is cuts[1]
    assert nearest(cuts, 4, 1, 1) is cuts[0]
    assert nearest(cuts, 16, 2, 4) is cuts[2]
    assert nearest([], 4, 2, 2) is None


def test_a_cut_that_was_played_takes_what_it_took() -> None:
    """Its seconds and its messages' come from there, its bytes from the layers."""
    candidate = Candidate("1f1b", 2, 1, 1, 4)
    plain, trials = predictor().costs(candidate), predictor(trial(2, 2, 2))
    costs = trials.costs(candidate)
    assert [cost.forward_s for cost in costs.stages] == [SLOWER * 0.08] * 2
    assert [cost.update_s for cost in costs.stages] == [0.5] * 2
    assert (costs.op_s, costs.link.latency_s) == (1e-3, 2e-3)
    alike = [
        replace(c, forward_s=0, input_grad_s=0, weight_grad_s=0, update_s=0)
        for c in costs.stages
    ]
    assert alike == [
        replace(c, forward_s=0, input_grad_s=0, weight_grad_s=0, update_s=0)
        for c in plain.stages
    ]


def test_another_cut_is_stretched_as_the_nearest_was() -> None:
    """Four stages of another size take as much longer as the two that were played."""
    found = predictor(trial(2, 2, 2)).costs(Candidate("looped-bfs", 2, 1, 2, 2))
    added = predictor().costs(Candidate("looped-bfs", 2, 1, 2, 2))
    for cost, plain in zip(found.stages, added.stages, strict=True):
        assert cost.forward_s == pytest.approx(SLOWER * plain.forward_s)
        assert cost.input_grad_s == pytest.approx(SLOWER * plain.input_grad_s)
        assert cost.weight_grad_s == pytest.approx(SLOWER * plain.weight_grad_s)


def test_without_messages_a_trial_says_nothing_of_them() -> None:
    """One device alone sent none: links stay what the cluster has."""
    costs = predictor(trial(2, 1, 1)).costs(Candidate("1f1b", 2, 1, 1, 4))
    assert costs.link == cluster(2, bytes_per_s=2**30).inside
    assert costs.op_s == 1e-3


def test_no_step_is_shorter_than_its_bound() -> None:
    """The quick bound knows what was played: else good candidates would be left out."""
    found = predictor(trial(2, 2, 2), trial(2, 2, 4))
    for name, v in (("gpipe", 1), ("1f1b", 1), ("looped-bfs", 2), ("zb-v", 2)):
        candidate = Candidate(name, 2, 1, v, 4)
        assert found.bound_s(candidate) <= found.outcome(candidate).step_s


def test_what_ddp_adds_is_added_once() -> None:
    """However many microbatches: gradients are reduced once per step."""
    alone = trial(4, 1, 1)
    for m in (1, 2):
        candidate = Candidate(DDP, 1, 2, 1, m)
        without = data_parallel_outcome(predictor(alone, ddp_s=0.0), candidate)
        found = data_parallel_outcome(predictor(alone, ddp_s=0.3), candidate)
        assert found.step_s == pytest.approx(without.step_s + 0.3)
        assert without.step_s == pytest.approx(8 * 4 * 0.03 * SLOWER + 0.5)


def on_two_devices(name: str) -> Candidate:
    """Plain data parallelism, in replicas or in shards."""
    num_shards = 2 if name == FSDP else 1
    return Candidate(name, 1, 2 // num_shards, 1, 1, num_shards=num_shards)


@pytest.mark.parametrize("name", [DDP, ZERO_1, FSDP])
def test_where_cores_are_shared_nothing_hides_a_reduction(name: str) -> None:
    """A step takes its computing and all that goes over the ring, one after another."""
    cores = replace(cluster(2), ring=GIB_PER_S, shares_cores=True)
    found = data_parallel_outcome(
        Predictor(work(8, weight_bytes=64 * MIB), cores, 8), on_two_devices(name)
    )
    weights_s = 8 * 64 / 1024  # of all, once around a ring of two: half of them, twice
    rounds = {DDP: 1, ZERO_1: 1, FSDP: 1.5 - 1 / 16}  # the last group stays in between
    assert found.step_s == pytest.approx(4 * 8 * 0.03 + rounds[name] * weights_s)


@pytest.mark.parametrize("name", [ZERO_1, FSDP])
def test_sharding_costs_the_host_no_less_than_ddp(name: str) -> None:
    """What DDP took beyond its ring is added; what the ring explains is not."""
    candidate = on_two_devices(name)
    ring_s = cluster(2, bytes_per_s=2**30).inside.ring_s(8 * 8 * MIB, 2)
    plain, within, beyond = (
        data_parallel_outcome(predictor(trial(4, 1, 1), ddp_s=ddp_s), candidate).step_s
        for ddp_s in (None, 0.9 * ring_s, ring_s + 0.2)
    )
    assert within == pytest.approx(plain)
    assert beyond == pytest.approx(plain + 0.2)
