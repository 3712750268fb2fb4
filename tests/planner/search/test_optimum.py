"""The search: against every order there is, closed forms, and what it must refuse."""

from __future__ import annotations

import sys
from dataclasses import replace
from random import Random
from time import perf_counter

import pytest

import hocket
from hocket.core.costs import Costs, Link, StageCost
from hocket.core.program import Net, Program, Stage
from hocket.core.simulate import simulate
from hocket.errors import FitError, MissingPackageError
from hocket.planner.search.optimum import search
from hocket.planner.search.result import SearchProgress, SearchResult
from tests.planner.search.every_order import least_makespan_s

pytest.importorskip("ortools")


def unequal(seed: int, num_stages: int) -> Costs:
    """Stages that differ in everything, on links that take time."""
    random = Random(seed)

    def stage() -> StageCost:
        kept = random.randint(1, 4)
        return StageCost(
            forward_s=random.randint(1, 4),
            input_grad_s=random.randint(1, 4),
            weight_grad_s=random.randint(1, 4),
            update_s=random.randint(0, 1),
            output_bytes=1,
            activation_bytes=kept,
            weight_grad_held_bytes=random.randint(0, kept),
            weight_bytes=3,
            gradient_bytes=random.randint(0, 2),
        )

    link = Link(random.choice([0.0, 0.5]), random.choice([float("inf"), 2.0]))
    handling = Link(random.choice([0.0, 0.25]))
    stages = tuple(stage() for _ in range(num_stages))
    return Costs(stages, link=link, handling=handling)


def peak_of(found: SearchResult, costs: Costs) -> float:
    """The most bytes on any device."""
    timeline = simulate(found.schedule, costs)
    return max(map(timeline.peak_bytes, range(found.schedule.program.num_devices)))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_limited", [False, True])
def test_finds_the_best_of_all_orders_there_are(seed: int, is_limited: bool) -> None:
    """Two devices, two microbatches in any order: 400 orders, each simulated."""
    program, costs = Program.chain([0, 1], 2), unequal(seed, 2)
    limit = 14 if is_limited else None
    least = least_makespan_s(
        program, costs, split_backward=True, memory_bytes=limit or float("inf")
    )
    if least == float("inf"):
        with pytest.raises(FitError):
            search(program, costs, limit, time_limit_s=20)
        return
    found = search(program, costs, limit, time_limit_s=20)

    assert found.makespan_s == pytest.approx(least)
    assert found.bound_s <= least * (1 + 1e-9)
    assert found.is_optimal
    assert not is_limited or peak_of(found, costs) <= 14
    hocket.check(found.schedule)


@pytest.mark.parametrize("seed", range(3))
def test_finds_the_best_where_backwards_stay_whole(seed: int) -> None:
    """Three devices, two microbatches: 216 orders."""
    program, costs = Program.chain([0, 1, 2], 2), unequal(seed, 3)
    least = least_makespan_s(program, costs, split_backward=False)
    found = search(program, costs, split_backward=False, time_limit_s=20)

    assert found.makespan_s == pytest.approx(least)
    assert found.is_optimal
    kinds = {op.kind.value for lane in found.schedule.lanes for op in lane.ops}
    assert kinds == {"F", "B", "U"}


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 4)])
def test_without_splitting_nothing_beats_1f1b(p: int, m: int) -> None:
    """Its (m + p - 1) (F + B) is the optimum, and the bound needs no search."""
    program = Program.chain(range(p), m)
    found = search(program, Costs.uniform(), split_backward=False)

    assert found.makespan_s == found.bound_s == 3 * (m + p - 1)


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 5), (4, 8)])
def test_a_split_backward_leaves_only_the_way_to_the_last_device(
    p: int, m: int
) -> None:
    """`m (F + I + W) + (p - 1) F`: the last device never waits once it has begun."""
    found = search(Program.chain(range(p), m), Costs.uniform(), time_limit_s=60)

    assert found.makespan_s == pytest.approx(3 * m + p - 1)
    assert found.is_optimal


def test_less_memory_is_never_faster_and_is_kept() -> None:
    """From one microbatch on each device to all of them."""
    program, costs = Program.chain([0, 1, 2], 4), Costs.uniform()
    found = [search(program, costs, limit, time_limit_s=20) for limit in range(1, 5)]
    spans = [one.makespan_s for one in found]

    assert spans == sorted(spans, reverse=True)
    assert spans[0] > spans[-1]
    assert all(one.is_optimal for one in found)
    for limit, one in enumerate(found, 1):
        timeline = simulate(one.schedule, costs)
        assert max(map(timeline.peak_activations, range(3))) <= limit
        assert timeline.makespan_s == one.makespan_s


def test_too_little_memory_names_the_least_that_works() -> None:
    """W keeps half of what F left, gradients come with the first W: 9 bytes."""
    share = StageCost(
        forward_s=1,
        input_grad_s=1,
        weight_grad_s=1,
        activation_bytes=4,
        weight_grad_held_bytes=2,
        weight_bytes=3,
        gradient_bytes=2,
    )
    program, costs = Program.chain([0, 1], 3), Costs((share, share))
    with pytest.raises(FitError, match="device") as refusal:
        search(program, costs, 5, time_limit_s=20)
    least = refusal.value.needed_bytes
    assert str(least) in str(refusal.value)

    assert peak_of(search(program, costs, least, time_limit_s=20), costs) <= least
    with pytest.raises(FitError) as closer:
        search(program, costs, least - 1, time_limit_s=20)
    assert closer.value.needed_bytes == least


def test_weight_gradients_wait_where_that_takes_less() -> None:
    """A large gradient beside small activations: no W before the last I is the least.

    One microbatch after another would hold 10 bytes of gradients beside an activation.
    """
    share = StageCost(1, 1, 1, activation_bytes=4, gradient_bytes=10)
    program, costs = Program.chain([0], 3), Costs((share,))
    with pytest.raises(FitError) as refusal:
        search(program, costs, 9, time_limit_s=20)

    assert refusal.value.needed_bytes == 10
    assert search(program, costs, 10, time_limit_s=20).makespan_s == 9.0


def test_what_waits_in_queues_counts_too() -> None:
    """Inputs that come early lie at the receiver; the limit holds with them."""
    fast = StageCost(1, 1, 1, output_bytes=5, activation_bytes=1)
    slow = StageCost(6, 1, 1, activation_bytes=1)
    program, costs = Program.chain([0, 1], 4), Costs((fast, slow))
    free = search(program, costs, time_limit_s=10)
    most = peak_of(free, costs)
    tight = search(program, costs, int(most) - 5, time_limit_s=10)

    assert peak_of(tight, costs) <= most - 5
    assert tight.makespan_s >= free.makespan_s


def test_messages_on_links_are_part_of_the_optimum() -> None:
    """Bytes that take as long as a forward: the simulator agrees with the search."""
    share = StageCost(2, 2, 2, output_bytes=2, input_grad_bytes=2)
    costs = Costs((share, share), link=Link(0.5, 1.0))
    program = Program.chain([0, 1], 4)
    found = search(program, costs, time_limit_s=20)

    assert simulate(found.schedule, costs).makespan_s == found.makespan_s
    # Device 1 begins after a forward and its message, and then need not wait.
    assert found.makespan_s == found.bound_s == 2 + 2 + 0.5 + 4 * 6


def test_replicas_and_updates_are_part_of_it() -> None:
    """The last reduction and the update come after all W of a stage."""
    share = StageCost(1, 1, 1, update_s=1, gradient_bytes=4)
    costs = Costs((share, share), reduce_link=Link(0.0, 2.0))
    found = search(Program.chain([0, 1], 4, num_replicas=2), costs, time_limit_s=20)

    assert found.makespan_s == pytest.approx(1 + 4 * 3 + 2 + 1)
    hocket.check(found.schedule)


def test_a_teacher_and_a_student_are_searched_like_any_program() -> None:
    """Two nets, a loss over the whole batch, several steps: all from dataflow."""
    program = Program(
        (Net("teacher", 2), Net("student", 2, batch_loss=True)),
        (
            Stage("teacher", 0, trainable=False),
            Stage("teacher", 1, trainable=False),
            Stage("student", 0),
            Stage("student", 1),
        ),
        ((0, 1), (1, 3), (2, 3)),
        num_steps=2,
    )
    found = search(program, Costs.uniform(), time_limit_s=20)

    hocket.check(found.schedule)
    assert found.bound_s <= found.makespan_s
    assert found.gap < 0.1


def test_times_that_are_no_simple_ratios_are_proved_too() -> None:
    """Measured seconds: whole ticks round down, and the bound stays one."""
    stages = tuple(
        StageCost(0.0013847 + 1e-5 * i, 0.0012912, 0.0006123 + 3e-6 * i)
        for i in range(3)
    )
    program, costs = Program.chain([0, 1, 2], 4), Costs(stages)
    found = search(program, costs, time_limit_s=20)

    assert found.is_optimal
    assert found.bound_s <= found.makespan_s * (1 + 1e-12)


def test_reports_how_far_it_has_come() -> None:
    """Orders get faster and bounds higher; the last word is the result."""
    reported: list[SearchProgress] = []
    costs = unequal(3, 3)
    found = search(
        Program.chain([0, 1, 2], 4), costs, time_limit_s=20, progress=reported.append
    )
    spans = [one.makespan_s for one in reported]
    bounds = [one.bound_s for one in reported]

    assert spans == sorted(spans, reverse=True)
    assert bounds == sorted(bounds)
    assert (spans[-1], bounds[-1]) == (found.makespan_s, found.bound_s)
    assert reported[-1].gap == found.gap


def test_ends_when_time_is_up_with_the_best_so_far() -> None:
    """A hard one: stages that differ, and room for little more than one microbatch."""
    program, costs = Program.chain(range(5), 15), unequal(1, 5)
    begin_s = perf_counter()
    found = search(program, costs, 20, time_limit_s=1.0)

    assert perf_counter() - begin_s < 30
    assert not found.is_optimal
    assert found.bound_s < found.makespan_s < float("inf")
    assert peak_of(found, costs) <= 20
    hocket.check(found.schedule)


def test_a_large_program_gets_a_bound_and_a_published_order() -> None:
    """Six thousand ops are not given to the solver."""
    program = Program.chain(range(16), 128)
    found = search(program, Costs.uniform())

    assert found.makespan_s == found.bound_s == 3 * 128 + 15
    hocket.check(found.schedule)


def test_jitter_is_left_out() -> None:
    """It says how much ops differ by chance, which no order can be chosen for."""
    program, costs = Program.chain([0, 1], 3), Costs.uniform()
    calm = search(program, costs)
    assert search(program, replace(costs, jitter=0.2)).makespan_s == calm.makespan_s


def test_without_ortools_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And imports nothing of it before."""
    for name in ("ortools", "ortools.sat.python", "ortools.sat.python.cp_model"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError, match=r"pip install 'hocket\[search\]'"):
        search(Program.chain([0], 1), Costs.uniform())
