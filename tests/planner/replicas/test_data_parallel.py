"""Plain data parallelism: closed forms of its overlap, its messages and its memory."""

from __future__ import annotations

import pytest

from hocket.core.costs import Costs, StageCost
from hocket.core.simulate import simulate
from hocket.planner.candidate import Candidate
from hocket.planner.predict import Predictor
from hocket.planner.replicas.data_parallel import (
    data_parallel_outcome,
    data_parallel_timeline,
)
from hocket.planner.stages import BUCKET_BYTES, group_layers
from hocket.planner.work import Weights
from tests.planner.toys import MIB, cluster, layers, work


def predictor(
    num_devices: int = 4, *, weight_bytes: int = 64 * MIB, bytes_per_s: float = 1e10
) -> Predictor:
    """Eight equal layers, a bucket each."""
    return Predictor(
        work(8, weight_bytes=weight_bytes),
        cluster(num_devices, bytes_per_s=bytes_per_s),
        8,
    )


def candidate(name: str, num_devices: int = 4, num_microbatches: int = 1) -> Candidate:
    """Plain data parallelism on so many devices; hsdp in two replicas."""
    shards = {"fsdp": num_devices, "hsdp": num_devices // 2}.get(name, 1)
    return Candidate(name, 1, num_devices // shards, 1, num_microbatches, False, shards)


def test_ddp_hides_all_reductions_but_the_last() -> None:
    """Where a reduction is shorter than a layer's backward, one of them sticks out."""
    found = data_parallel_outcome(predictor(), candidate("ddp"))
    ring_s = 2 * 3 * (64 * MIB / 4) / 1e10
    assert ring_s < 2 * 0.02  # of two samples
    assert found.step_s == pytest.approx(2 * 8 * 0.03 + ring_s)
    assert found.reduce_bytes == 8 * 64 * MIB
    assert found.message_bytes == 0


def test_ddp_waits_for_the_ring_where_that_is_slow() -> None:
    """Then all reductions follow each other behind the first layer's backward."""
    found = data_parallel_outcome(predictor(bytes_per_s=1e8), candidate("ddp"))
    ring_s = 2 * 3 * (64 * MIB / 4) / 1e8
    assert found.step_s == pytest.approx(2 * (8 * 0.01 + 0.02) + 8 * ring_s)


def test_gradients_are_reduced_once_per_step() -> None:
    """Two microbatches take twice the compute and no more messages."""
    one = data_parallel_outcome(predictor(), candidate("ddp"))
    two = data_parallel_outcome(predictor(), candidate("ddp", num_microbatches=2))
    assert two.reduce_bytes == one.reduce_bytes
    assert two.step_s == pytest.approx(one.step_s)  # half the samples, twice


def test_fsdp_gathers_for_each_forward_and_backward() -> None:
    """With a ring that takes no time it is as fast as ddp, and all compute."""
    fast = predictor(bytes_per_s=float("inf"))
    found = data_parallel_outcome(fast, candidate("fsdp"))
    assert found.step_s == pytest.approx(2 * 8 * 0.03)
    assert found.bubble_fraction == pytest.approx(0.0)
    assert found.message_bytes == (2 * 8 - 1) * 64 * MIB


def test_fsdp_is_bound_by_its_ring_where_that_is_slow() -> None:
    """Gathering twice and scattering once take three half rings per group."""
    found = data_parallel_outcome(predictor(bytes_per_s=1e7), candidate("fsdp"))
    half_s = 3 * (64 * MIB / 4) / 1e7
    total_s = (2 * 8 - 1 + 8) * half_s
    assert total_s <= found.step_s <= total_s + 2 * 8 * 0.03


@pytest.mark.parametrize("bytes_per_s", [1e7, 1e10, float("inf")])
def test_fsdp_computes_and_communicates_side_by_side(bytes_per_s: float) -> None:
    """Its step in a closed form: where neither waits, the longer of both, and its ends.

    Gathers are asked for one group ahead, and reductions follow the last gather.
    """
    half_s = 3 * (64 * MIB / 4) / bytes_per_s
    found = data_parallel_outcome(predictor(bytes_per_s=bytes_per_s), candidate("fsdp"))
    forward_s, backward_s = 0.02, 0.04
    if half_s <= forward_s / 2:  # hidden, but for the first gather and the last scatter
        expected_s = half_s + 8 * (forward_s + backward_s) + half_s
    else:  # the last scatter waits for all others, and the last backward for none
        expected_s = (15 + 8) * half_s + backward_s
    assert found.step_s == pytest.approx(expected_s, rel=2e-2)


def test_microbatches_of_fsdp_are_gathered_and_reduced_one_by_one() -> None:
    """As fully_shard does: each adds its own, and memory holds shards of gradients."""
    one = data_parallel_outcome(predictor(), candidate("fsdp"))
    two = data_parallel_outcome(predictor(), candidate("fsdp", num_microbatches=2))
    ring_s = 3 * (64 * MIB / 4) / 1e10
    assert two.step_s == pytest.approx(one.step_s + 2 * ring_s)
    assert two.message_bytes == 2 * one.message_bytes
    assert two.memory[0].gradient_bytes == 8 * 64 * MIB // 4


def test_hsdp_is_fsdp_in_groups_and_an_all_reduce_of_each_shard() -> None:
    """Two replicas of two shards: half the weights on each, and the replicas' ring."""
    slow = predictor(bytes_per_s=1e7)
    found = data_parallel_outcome(slow, candidate("hsdp"))
    half_s, ring_s = (64 * MIB / 2) / 1e7, 2 * (64 * MIB / 2 / 2) / 1e7
    total_s = (2 * 8 - 1 + 8) * half_s + 8 * ring_s
    assert total_s <= found.step_s <= total_s + 2 * 8 * 0.03
    assert found.memory[0].weight_bytes == 8 * 64 * MIB // 2
    assert str(found.candidate.layout) == "1x2x2"


def test_sharding_divides_what_it_shards() -> None:
    """Optimizer state by zero1; weights and gradients too by fsdp."""
    whole = 8 * 64 * MIB
    splits = {
        name: data_parallel_outcome(predictor(), candidate(name)).memory[0]
        for name in ("ddp", "ddp+zero1", "fsdp")
    }
    assert splits["ddp"].weight_bytes == splits["ddp"].gradient_bytes == whole
    assert splits["ddp"].optimizer_bytes == 2 * whole
    assert splits["ddp+zero1"].weight_bytes == whole
    assert splits["ddp+zero1"].optimizer_bytes == 2 * whole // 4
    assert splits["fsdp"].weight_bytes == splits["fsdp"].gradient_bytes == whole // 4
    assert splits["fsdp"].optimizer_bytes == 2 * whole // 4
    totals = [split.total_bytes for split in splits.values()]
    assert totals == sorted(totals, reverse=True)


def test_the_picture_is_that_of_the_simulator() -> None:
    """ddp is played by the same simulator as every pipeline: op by op the same."""
    timeline = data_parallel_timeline(predictor(), candidate("ddp"))
    group = StageCost(
        forward_s=0.02,
        input_grad_s=0.02,
        weight_grad_s=0.02,
        gradient_bytes=64 * MIB,
    )
    link = cluster(4, bytes_per_s=1e10).reduce_link(1, 4)
    costs = Costs((group,) * 8, reduce_link=link)
    assert timeline.makespan_s == pytest.approx(
        simulate(timeline.schedule, costs).makespan_s
    )


def test_layers_form_groups_of_a_bucket() -> None:
    """From the last one on; a weight that two layers share is counted once."""
    half = layers(6, weight_bytes=BUCKET_BYTES // 2)
    assert group_layers(half) == (2, 4)
    large = layers(3, weight_bytes=2 * BUCKET_BYTES)
    assert group_layers(large) == (1, 2)
    shared = (Weights("shared", BUCKET_BYTES, 0, 0),)
    tied = tuple(
        type(layer)(layer.name, 1.0, 1.0, 1.0, weights=shared) for layer in half
    )
    assert group_layers(tied) == (5,)
