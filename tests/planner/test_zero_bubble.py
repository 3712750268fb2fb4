"""Orders that split backwards, among the candidates."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from hocket.core.op import Kind
from hocket.planner.candidate import Candidate
from hocket.planner.predict import Predictor
from hocket.planner.rank import Search, rank
from hocket.planner.stages import stage_costs
from hocket.planner.work import HeldBytes, MeasuredCosts
from tests.planner.toys import MIB, cluster, layers, work

NAMES: Final = ("1f1b", "zb-h1", "zb-h2", "zb-auto")
SEARCH: Final = Search(
    schedules=NAMES,
    num_devices=(4,),
    num_microbatches=(8,),
    recompute=(False,),
    data_parallel=False,
    is_exhaustive=True,
)


def candidate(name: str) -> Candidate:
    """Four devices, eight microbatches."""
    return Candidate(name, 4, 1, 1, 8)


def test_the_search_for_an_order_beats_what_is_made_by_hand() -> None:
    """It is made for the costs, and for the memory that there is."""
    ranking = rank(work(8), cluster(4, latency_s=1e-3), 8, SEARCH)
    step_s = {x.candidate.schedule: x.step_s for x in ranking.outcomes}
    assert step_s.keys() == set(NAMES)
    assert step_s["zb-auto"] == min(step_s.values())
    assert step_s["zb-h1"] < step_s["1f1b"]


@pytest.mark.parametrize("mib", [200, 216, 240, 400])
def test_an_order_that_is_made_for_the_memory_fits_it(mib: int) -> None:
    """Where another one would not, and as far as any order can."""
    small = cluster(4, memory_bytes=mib * MIB)
    job = work(8, activation_bytes=16 * MIB)
    ranking = rank(job, small, 8, SEARCH)
    missing = {x.candidate.schedule: x.missing_bytes for x in ranking.outcomes}
    assert missing["zb-auto"] == min(missing.values())
    if not missing["zb-auto"]:
        found = {x.candidate.schedule: x for x in ranking.fitting}
        assert all(found["zb-auto"].step_s <= x.step_s for x in found.values())


def test_too_little_memory_is_reported_with_what_would_do() -> None:
    """The order that needs least is looked at, so that no larger number is named."""
    job, devices = work(8), cluster(4, memory_bytes=MIB)
    (outcome,) = rank(job, devices, 8, replace(SEARCH, schedules=("zb-auto",))).outcomes
    enough = replace(devices, memory_bytes=outcome.peak_bytes)
    assert Predictor(job, enough, 8).outcome(candidate("zb-auto")).fits
    assert outcome.missing_bytes == outcome.peak_bytes - MIB


def test_the_assumption_is_named_where_it_counts() -> None:
    """Nothing says how much of what a forward left its weight gradients need."""
    note = "activations are held until W is done"
    split = rank(work(8), cluster(4), 8, SEARCH)
    whole = rank(work(8), cluster(4), 8, replace(SEARCH, schedules=("1f1b",)))
    assert note in str(split).replace("\n", " ")
    assert "Assumed of zb-auto, zb-h1, zb-h2, which split" in str(split)
    assert note not in str(whole).replace("\n", " ")
    (cost,) = stage_costs(layers(2), (), recomputes=False, update_s_per_byte=0.0)
    assert cost.weight_grad_held_bytes == cost.activation_bytes


def test_what_was_measured_of_halves_is_counted() -> None:
    """And then nothing is assumed."""
    split = HeldBytes(3 * MIB, MIB, 2 * MIB, MIB)
    known = tuple(replace(layer, split=split) for layer in layers(2))
    (cost,) = stage_costs(known, (), recomputes=False, update_s_per_byte=0.0)
    assert cost.weight_grad_held_bytes == 7 * MIB
    assert cost.weight_grad_work_bytes == MIB

    measured = MeasuredCosts("Toy", (1, 1), (known * 4, known * 4), 0.0, "a toy")
    assert measured.layers(3)[0].split == HeldBytes(9 * MIB, 3 * MIB, 6 * MIB, 3 * MIB)
    assert "Assumed of" not in str(rank(measured, cluster(4), 8, SEARCH))


def test_only_orders_that_split_hold_more() -> None:
    """As many forwards are in flight; what waits for its W comes on top."""
    predictor = Predictor(work(8), cluster(4), 8)
    peaks = {
        name: [x.activation_bytes for x in predictor.outcome(candidate(name)).memory]
        for name in ("1f1b", "zb-h1")
    }
    assert peaks["zb-h1"][-1] > peaks["1f1b"][-1]
    assert predictor.placement(candidate("zb-h1")).splits
    assert not predictor.placement(candidate("1f1b")).splits
    ops = [
        op for lane in predictor.schedule(candidate("zb-h1")).lanes for op in lane.ops
    ]
    whole = [op for op in ops if op.kind is Kind.BACKWARD]
    assert {op.stage for op in whole} == {0}  # no op waits for its I


def costly(split_s: float) -> MeasuredCosts:
    """Eight layers whose halves take so much longer than their whole backward."""
    slow = tuple(replace(layer, split_s=split_s) for layer in layers(8))
    return MeasuredCosts("Toy", (1, 1), (slow, slow), 0.0, "a toy")


def test_where_halves_take_much_longer_whole_backwards_win() -> None:
    """Small layers: what the host does for a half is no small part of it."""
    orders = replace(SEARCH, schedules=("1f1b", "zb-h1"))
    for split_s, best in ((0.0, "zb-h1"), (0.001, "zb-h1"), (0.02, "1f1b")):
        ranking = rank(costly(split_s), cluster(4), 8, orders)
        assert ranking.best is not None
        assert ranking.best.candidate.schedule == best
    plain, split = (
        {x.candidate.schedule: x.step_s for x in rank(work, cluster(4), 8).outcomes}
        for work in (costly(0.0), costly(0.02))
    )
    assert all(split[name] == plain[name] for name in ("1f1b", "gpipe", "ddp"))


def test_no_order_is_faster_than_the_bound_when_halves_take_longer() -> None:
    """An order may keep backwards whole: the bound may not count halves dearer."""
    for outcome in rank(costly(0.02), cluster(4), 8, SEARCH).outcomes:
        assert outcome.bound_s <= outcome.step_s
        predictor = Predictor(costly(0.02), cluster(4), 8)
        assert predictor.bound_s(outcome.candidate) <= outcome.step_s


def test_halves_take_as_much_longer_at_any_size() -> None:
    """Two sizes show what is fixed of it and what grows; neither is negative."""
    one, four = layers(2, seconds=0.01), layers(2, seconds=0.04)
    sizes = [
        tuple(replace(x, split_s=s) for x in of) for of, s in ((one, 2.0), (four, 5.0))
    ]
    measured = MeasuredCosts("Toy", (1, 4), (sizes[0], sizes[1]), 0.0, "a toy")
    assert measured.layers(2)[0].split_s == pytest.approx(3.0)
    for split_s, expected in ((-1.0, 0.0), (0.5, 1.0)):
        noisy = [replace(x, split_s=split_s) for x in one]
        (cost,) = stage_costs(noisy, (), recomputes=False, update_s_per_byte=0.0)
        assert cost.split_s == expected


def test_a_bubble_that_repeats_is_reported_with_its_numbers() -> None:
    """V-Min's, where the times are not equal: stages that recompute have a longer I."""
    theirs = replace(SEARCH, schedules=("v-min",))
    equal = rank(work(8), cluster(4), 8, theirs)
    unequal = rank(work(8), cluster(4), 8, replace(theirs, recompute=(True,)))
    assert not any("repeats a bubble" in note for note in equal.notes)
    assert any("v-min repeats a bubble of" in note for note in unequal.notes)
