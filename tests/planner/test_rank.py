"""The ranking: closed forms, what must never get worse, and what is chosen when."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.core.op import Kind
from hocket.draw.quantity import short
from hocket.errors import PlanError
from hocket.planner.candidate import Candidate, Outcome
from hocket.planner.predict import Predictor
from hocket.planner.rank import Search, rank
from hocket.planner.ranking.report import Ranking
from hocket.planner.ranking.table import advice
from tests.planner.toys import EVERYTHING, MIB, cluster, layers, ranked, work

pytestmark = pytest.mark.xdist_group("rankings")  # in one process, which keeps them

KEEPS = {"recomputes": False}


def outcome_of(ranking: Ranking, **wanted: object) -> Outcome:
    """The one outcome whose candidate has these values."""
    (found,) = (
        outcome
        for outcome in ranking.outcomes
        if all(getattr(outcome.candidate, k) == v for k, v in wanted.items())
    )
    return found


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 8), (8, 16)])
def test_bubble_of_equal_stages_is_the_papers(name: str, p: int, m: int) -> None:
    """(p - 1) / (m + p - 1), for GPipe and 1F1B, with messages that cost nothing."""
    free = cluster(p, bytes_per_s=float("inf"))
    ranking = ranked(work(8), free, m, replace(EVERYTHING, num_devices=(p,)))
    found = outcome_of(
        ranking, schedule=name, num_devices=p, num_microbatches=m, recomputes=False
    )
    assert found.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
    assert found.step_s == pytest.approx((m + p - 1) * 8 / p * 0.03)
    assert found.samples_per_s == pytest.approx(m / found.step_s)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16)])
def test_the_gap_is_what_a_split_backward_could_win(p: int, m: int) -> None:
    """Fill and work is the least: 1F1B drains (p - 1) (I + W) longer than that."""
    free = cluster(p, bytes_per_s=float("inf"))
    ranking = ranked(work(8), free, m, replace(EVERYTHING, num_devices=(p,)))
    same = {"num_devices": p, "num_microbatches": m, "recomputes": False}
    found = outcome_of(ranking, schedule="1f1b", **same)
    assert found.gap == pytest.approx(2 * (p - 1) / (3 * m + p - 1))
    alone = outcome_of(ranking, schedule="one-device", num_microbatches=1, **KEEPS)
    assert alone.gap == pytest.approx(0.0)
    assert all(outcome.gap >= 0.0 for outcome in ranking.outcomes)


def test_1f1b_holds_fewer_activations_than_gpipe() -> None:
    """The first stage holds p microbatches, not all m of them; weights are the same."""
    ranking = ranked(work(8), cluster(4), 16, EVERYTHING)
    same = {"num_devices": 4, "num_microbatches": 16, "recomputes": False}
    one = outcome_of(ranking, schedule="1f1b", **same)
    all_ = outcome_of(ranking, schedule="gpipe", **same)
    assert one.memory[0].activation_bytes < all_.memory[0].activation_bytes / 3
    assert one.memory[0].weight_bytes == all_.memory[0].weight_bytes == 16 * MIB
    assert one.memory[0].gradient_bytes == 16 * MIB
    assert one.memory[0].optimizer_bytes == 32 * MIB


def test_recomputation_saves_memory_and_costs_a_forward() -> None:
    """GPipe with all forwards again: 4/3 of the time, and far fewer activations."""
    free = cluster(4, bytes_per_s=float("inf"))
    ranking = rank(work(8), free, 16, replace(EVERYTHING, num_devices=(4,)))
    same = {"schedule": "gpipe", "num_microbatches": 16}
    keeps = outcome_of(ranking, recomputes=False, **same)
    again = outcome_of(ranking, recomputes=True, **same)
    assert again.step_s == pytest.approx(keeps.step_s * 4 / 3)
    assert again.peak_bytes < keeps.peak_bytes


def test_the_parts_of_memory_add_up_to_the_peak() -> None:
    """To what the simulated timeline says, device by device, of every pipeline."""
    job, devices = work(8), cluster(4)
    predictor = Predictor(job, devices, 16)
    for outcome in ranked(job, devices, 16, EVERYTHING).outcomes:
        if outcome.candidate.is_data_parallel:
            continue
        timeline = predictor.timeline(outcome.candidate)
        for device, split in enumerate(outcome.memory):
            assert split.total_bytes == timeline.peak_bytes(device)
            assert split.activation_bytes >= 0
        if not outcome.delay:  # else the pipeline's filling counts once per run
            assert outcome.bubble_fraction == pytest.approx(timeline.bubble_fraction)


def check_best(
    num_devices: int,
    batch_size: int,
    num_layers: int,
    latency_s: float,
    bytes_per_s: float,
) -> None:
    """The bound is one: the best so many are those of simulating everything."""
    job = work(num_layers, update_s_per_byte=1e-10)
    devices = cluster(num_devices, latency_s=latency_s, bytes_per_s=bytes_per_s)
    all_ = rank(job, devices, batch_size, EVERYTHING)
    few = rank(job, devices, batch_size, Search(num_best=5))
    assert few.fitting[:5] == all_.fitting[:5]
    assert few.num_candidates >= len(all_.outcomes)
    shards = {x.candidate.num_shards for x in all_.outcomes}
    assert shards == {x for x in range(1, num_devices + 1) if num_devices % x == 0}
    predictor = Predictor(job, devices, batch_size)
    for outcome in all_.outcomes:
        if not outcome.candidate.is_data_parallel:
            bound_s = predictor.bound_s(outcome.candidate)
            assert bound_s <= outcome.step_s * (1 + 1e-9)


NUM_LAYERS = st.integers(6, 9)
LATENCIES_S = st.sampled_from([0.0, 1e-4, 5e-3])
BYTES_PER_S = st.sampled_from([1e11, 1e9, 1e8])  # on the slowest, gathers are no less


@given(
    st.sampled_from([2, 3, 4]),
    st.sampled_from([8, 12]),
    NUM_LAYERS,
    LATENCIES_S,
    BYTES_PER_S,
)
@settings(max_examples=4)
def test_what_is_left_out_could_not_have_been_among_the_best(
    num_devices: int,
    batch_size: int,
    num_layers: int,
    latency_s: float,
    bytes_per_s: float,
) -> None:
    """Few are simulated, and the best of them are the best of all."""
    check_best(num_devices, batch_size, num_layers, latency_s, bytes_per_s)


@pytest.mark.long
@given(
    st.sampled_from([2, 3, 4, 6]),
    st.sampled_from([8, 12, 16]),
    NUM_LAYERS,
    LATENCIES_S,
    BYTES_PER_S,
)
@settings(max_examples=40)
def test_the_same_for_more_sizes(
    num_devices: int,
    batch_size: int,
    num_layers: int,
    latency_s: float,
    bytes_per_s: float,
) -> None:
    """On up to six devices, with up to 16 samples."""
    check_best(num_devices, batch_size, num_layers, latency_s, bytes_per_s)


@pytest.mark.long
def test_seconds_scaled_leave_the_order_as_it_is() -> None:
    """Twice as slow a device, with links twice as slow, ranks all the same."""
    fast = rank(work(8), cluster(4, latency_s=1e-3), 8, EVERYTHING)
    slow = rank(
        work(8, seconds=0.02),
        cluster(4, bytes_per_s=0.5e11, latency_s=2e-3),
        8,
        EVERYTHING,
    )
    names = [outcome.candidate for outcome in fast.outcomes]
    assert [outcome.candidate for outcome in slow.outcomes] == names
    for a, b in zip(fast.outcomes, slow.outcomes, strict=True):
        assert b.step_s == pytest.approx(2 * a.step_s)


@pytest.mark.long
def test_more_bandwidth_is_never_slower() -> None:
    """Of every candidate, on one node and on two."""
    for num_nodes in (1, 2):
        found = [
            {
                x.candidate: x.step_s
                for x in rank(
                    work(8, message_bytes=64 * MIB),
                    cluster(
                        4,
                        bytes_per_s=rate,
                        num_nodes=num_nodes,
                        network_bytes_per_s=rate / 10,
                    ),
                    4,
                    EVERYTHING,
                ).outcomes
            }
            for rate in (1e9, 1e10, 1e11)
        ]
        for slow, fast in pairwise(found):
            assert slow.keys() == fast.keys()
            assert all(fast[x] <= slow[x] * (1 + 1e-9) for x in slow)


def test_more_memory_never_fits_fewer() -> None:
    """And what fits is never worse at its best."""
    fits: set[Candidate] = set()
    best = 0.0
    for gib in (0.1, 0.4, 1.6):
        ranking = rank(
            work(8, activation_bytes=64 * MIB),
            cluster(4, memory_bytes=int(gib * 2**30)),
            4,
            EVERYTHING,
        )
        now = {outcome.candidate for outcome in ranking.fitting}
        assert fits <= now
        assert ranking.best is None or ranking.best.samples_per_s >= best
        fits, best = now, ranking.best.samples_per_s if ranking.best else 0.0
    assert fits


def test_a_small_model_is_trained_by_data_parallelism() -> None:
    """Few weights to add up, and no bubble: nothing that a pipeline could save."""
    ranking = rank(work(8, weight_bytes=MIB), cluster(4), 64)
    assert ranking.best is not None
    assert ranking.best.candidate.schedule == "ddp"
    assert "you need no pipeline" in str(ranking)


def test_a_model_too_large_for_a_device_is_trained_in_a_pipeline() -> None:
    """A whole copy does not fit; sharded, its gathering takes longer than messages."""
    ranking = rank(
        work(8, weight_bytes=1024 * MIB, activation_bytes=MIB),
        cluster(4, memory_bytes=16 * 2**30, bytes_per_s=1e9),
        64,
    )
    assert ranking.best is not None
    assert not ranking.best.candidate.is_data_parallel
    assert ranking.best.candidate.num_devices == 4
    ddp = [x for x in ranking.outcomes if x.candidate.schedule == "ddp"]
    assert ddp
    assert all(x.missing_bytes == x.peak_bytes - 16 * 2**30 for x in ddp)
    assert "does not fit" in str(ranking)


def test_nothing_fits_says_what_misses_least() -> None:
    """With the number that would be needed, and ways out."""
    ranking = ranked(work(8), cluster(2, memory_bytes=MIB), 8, Search())
    assert ranking.best is None
    assert ranking.timeline is None
    least = ranking.too_large[0]
    assert least.missing_bytes == min(x.missing_bytes for x in ranking.outcomes)
    assert "Nothing fits" in str(ranking)
    assert "Use more devices" in str(ranking)


def test_a_slow_network_keeps_pipelines_inside_nodes_or_across_them() -> None:
    """Small messages cross a slow network better than all gradients do."""
    slow = cluster(4, num_nodes=2, network_bytes_per_s=1e8)
    ranking = rank(work(8, weight_bytes=64 * MIB), slow, 64)
    assert ranking.best is not None
    assert not ranking.best.candidate.is_data_parallel


def test_a_schedule_that_holds_the_model_twice_is_left_out() -> None:
    """Chimera's stages are not parts of one model: their costs would be wrong."""
    ranking = ranked(work(8), cluster(4), 16, EVERYTHING)
    names = {outcome.candidate.schedule for outcome in ranking.outcomes}
    assert "1f1b" in names
    assert "chimera" not in names


def test_of_equals_the_simplest_is_the_choice() -> None:
    """Within 1 % of the fastest; the table still begins with the fastest."""
    ranking = rank(work(8, weight_bytes=MIB), cluster(4, latency_s=1e-4), 64)
    assert ranking.best is not None
    assert ranking.fastest is not None
    assert ranking.best.samples_per_s >= 0.99 * ranking.fastest.samples_per_s
    assert ranking.fastest is next(x for x in ranking.outcomes if not x.delay)
    alike = [
        x
        for x in ranking.fitting
        if not x.delay and x.samples_per_s >= 0.99 * ranking.fastest.samples_per_s
    ]
    plain = [x for x in alike if x.candidate.is_data_parallel]
    assert ranking.best.candidate.schedule == "ddp"
    assert len({x.candidate.schedule for x in plain}) > 1


def test_one_device_is_a_plan_too() -> None:
    """Nothing to send and no bubble: what one device does alone."""
    ranking = rank(work(8), cluster(1), 8, EVERYTHING)
    assert {x.candidate.schedule for x in ranking.outcomes} == {"one-device"}
    best = outcome_of(ranking, num_microbatches=8, recomputes=False)
    assert best.step_s == pytest.approx(8 * 8 * 0.03)
    assert best.bubble_fraction == pytest.approx(0.0)
    assert best.message_bytes == best.reduce_bytes == 0


def test_microbatches_of_a_size_that_the_model_asks_for() -> None:
    """A model that fixes its number of samples gets no other."""
    fixed = replace(work(8), only_samples=4)
    ranking = rank(fixed, cluster(4), 32, EVERYTHING)
    sizes = {x.candidate.samples_of_microbatch(32) for x in ranking.outcomes}
    assert len(ranking.outcomes) > 10
    assert sizes == {4}


def test_a_batch_that_is_too_small_is_refused() -> None:
    """With the numbers."""
    with pytest.raises(PlanError, match="0 samples on 4 devices"):
        rank(work(8), cluster(4), 0)
    with pytest.raises(PlanError, match="no schedule is named '2f2b'"):
        rank(work(8), cluster(4), 8, Search(schedules=("2f2b",)))


def test_a_batch_that_does_not_divide_counts_the_largest_part() -> None:
    """10 samples on 4 replicas: some get 3."""
    ranking = rank(work(8), cluster(4), 10, EVERYTHING)
    ddp = outcome_of(ranking, schedule="ddp", num_microbatches=1, recomputes=False)
    assert ddp.step_s >= 3 * 8 * 0.03


def test_stages_of_tied_weights_hold_them_once_per_device() -> None:
    """The last layer uses the first one's weights: a stage with both has them once."""
    one = layers(4)
    tied = (*one[:-1], replace(one[-1], weights=one[0].weights))
    job = replace(work(4), profiles=(tied, tied))
    ranking = rank(job, cluster(2), 4, EVERYTHING)
    ddp = outcome_of(ranking, schedule="ddp", num_microbatches=2, recomputes=False)
    assert ddp.memory[0].weight_bytes == 3 * 8 * MIB
    pipe = outcome_of(ranking, schedule="1f1b", num_microbatches=4, recomputes=False)
    assert [split.weight_bytes for split in pipe.memory] == [16 * MIB, 16 * MIB]


def test_the_choice_follows_from_its_rule() -> None:
    """Nothing simpler is within 1 % of the fastest."""
    ranking = ranked(work(8), cluster(4), 16, EVERYTHING)
    best, fastest = ranking.best, ranking.fastest
    assert best is not None
    assert fastest is not None
    near = [
        outcome
        for outcome in ranking.fitting
        if outcome.samples_per_s >= 0.99 * fastest.samples_per_s and not outcome.delay
    ]
    assert best in near
    if not best.candidate.is_data_parallel:
        assert not any(x.candidate.is_data_parallel for x in near)
        assert best.candidate.num_stages == min(x.candidate.num_stages for x in near)


@pytest.mark.parametrize("is_tight", [False, True])
def test_sharded_candidates_are_pipelines_as_any(is_tight: bool) -> None:
    """Their parts of memory add up to the simulated peak; few gathers where that fits.

    Of what shards hold between steps, each has its part.
    """
    job, devices = work(8), cluster(8)
    candidate = Candidate("interleaved-1f1b", 2, 2, 4, 4, num_shards=2)
    if is_tight:
        ample = Predictor(job, devices, 16).outcome(candidate)
        devices = cluster(8, memory_bytes=ample.peak_bytes - 1)
    predictor = Predictor(job, devices, 16)
    found = predictor.outcome(candidate)
    timeline = predictor.timeline(candidate)
    whole = predictor.outcome(replace(candidate, num_replicas=4, num_shards=1))
    assert [x.total_bytes for x in found.memory] == [
        curve.peak for curve in timeline.memory
    ]
    for own, all_ in zip(found.memory, whole.memory, strict=True):
        assert own.weight_bytes == all_.weight_bytes // 2
        assert own.gradient_bytes == all_.gradient_bytes // 2
        assert own.optimizer_bytes == all_.optimizer_bytes // 2
        assert own.activation_bytes >= 0
    num_gathers = sum(
        op.kind is Kind.UNSHARD for lane in timeline.schedule.lanes for op in lane.ops
    )
    assert (num_gathers > 8) == is_tight
    sent = num_gathers * 8 * MIB + whole.message_bytes
    assert found.message_bytes == sent
    assert found.fits


def test_a_batch_must_have_a_sample_for_each_shard_and_microbatch() -> None:
    """Shards train on parts of the batch, as replicas do."""
    ranking = ranked(work(8), cluster(4), 12, EVERYTHING)
    assert any(x.candidate.num_shards > 1 for x in ranking.outcomes)
    for outcome in ranking.outcomes:
        shape = outcome.candidate
        assert shape.num_pipelines * shape.num_microbatches <= 12
        assert shape.layout.num_workers in {4, 1}


def test_only_the_layout_that_was_asked_for() -> None:
    """Beside plain data parallelism, whose layouts are all there are."""
    search = Search(num_devices=(2,), num_shards=(2,))
    ranking = rank(work(8), cluster(8), 32, search)
    pipelines = {
        str(x.candidate.layout)
        for x in ranking.outcomes
        if not x.candidate.is_data_parallel
    }
    assert pipelines == {"2x2x2"}
    plain = {x.candidate.schedule for x in ranking.outcomes}
    assert {"ddp", "fsdp", "hsdp"} <= plain


def test_what_fits_no_device_whole_and_has_fast_links_is_sharded() -> None:
    """And the sentence that says so has the numbers of the best pipeline beside it."""
    job = work(8, weight_bytes=512 * MIB, activation_bytes=MIB)
    ranking = rank(job, cluster(4, memory_bytes=9 * 2**30), 64)
    assert ranking.best is not None
    assert ranking.best_pipeline is not None
    assert ranking.best.candidate.schedule in {"fsdp", "hsdp"}
    assert any(x.startswith("you need no pipeline: ") for x in advice(ranking))
    (line,) = (x for x in advice(ranking) if x.startswith("the best pipeline: "))
    assert ranking.best_pipeline.candidate.schedule in line
    assert short(ranking.best_pipeline.samples_per_s) in line


@pytest.mark.parametrize(("bytes_per_s", "is_worth_it"), [(1e7, False), (1e9, True)])
def test_devices_that_bring_little_are_named(
    bytes_per_s: float, is_worth_it: bool
) -> None:
    """Four that are less than twice as fast as one: is that what they cost?"""
    job = work(8, weight_bytes=64 * MIB)
    ranking = rank(job, cluster(4, bytes_per_s=bytes_per_s), 8, EVERYTHING)
    lines = [x for x in advice(ranking) if x.startswith("4 devices are 1.186 times")]
    assert ranking.best is not None
    assert ranking.best.candidate.num_devices > 1 or is_worth_it
    assert (lines == []) == is_worth_it


@pytest.mark.parametrize("shares_cores", [False, True])
@pytest.mark.parametrize("bytes_per_s", [1e7, 1e9, 1e11])
@pytest.mark.parametrize("memory_bytes", [10**12, 10**8])
def test_the_bounds_of_sharded_stages_are_bounds(
    shares_cores: bool, bytes_per_s: float, memory_bytes: int
) -> None:
    """However slow gathers are, and however often they are done for lack of memory."""
    job = work(8, weight_bytes=32 * MIB, update_s_per_byte=1e-10)
    devices = replace(
        cluster(
            8,
            bytes_per_s=bytes_per_s,
            memory_bytes=memory_bytes,
            num_nodes=2,
            network_bytes_per_s=bytes_per_s / 10,
        ),
        shares_cores=shares_cores,
    )
    predictor = Predictor(job, devices, 16)
    names = (("gpipe", 1), ("1f1b", 1), ("looped-bfs", 4), ("zb-v", 2), ("zb-h1", 1))
    for name, v in names:
        for replicas, shards in ((1, 4), (2, 2), (4, 1)):
            candidate = Candidate(name, 2, replicas, v, 4, num_shards=shards)
            step_s = predictor.outcome(candidate).step_s * (1 + 1e-9)
            assert predictor.bound_s(candidate) <= step_s
            assert predictor.tight_bound_s(candidate) <= step_s
