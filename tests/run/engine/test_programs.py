"""Any program in any order that `check` accepts trains to the emulator's numbers.

Hypothesis draws programs of one to three nets on one to eight workers, and orders: one
step or overlapping steps, one or two lanes per device, whole and split backwards. A
failing order is kept as text in `orders/`, and all orders there are always run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket.core.check import check
from hocket.core.checker.links import Links
from hocket.core.gates import early_updates, gates_of
from hocket.core.schedule import Schedule
from hocket.errors import RunError
from hocket.passes.fill_with import fill_with
from hocket.run.engine.lanes.play_plan import plan_to_play
from hocket.run.engine.lanes.point_to_point import plan_messages, refuse_unordered
from hocket.schedules import SCHEDULES, make_schedule
from tests.passes.support.teachers import FROZEN, equal_costs, with_teacher
from tests.run.support.forked import answers_of
from tests.run.support.program_pool import ProgramPools
from tests.run.support.random_programs import random_schedule

ORDERS: Final = Path(__file__).parent / "orders"
TOLERANCE: Final = 1e-10
FLUSH_FREE: Final = {"pipedream", "pipedream-2bw", "wpipe", "wpipe-overlapped"}
SEEDS: Final = st.integers(0, 2**32 - 1)
NO_SHRINKING: Final = settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProgramPools]:
    """Workers, started once for all programs."""
    found = ProgramPools(tmp_path_factory.mktemp("programs"))
    yield found
    found.close()


def run(pools: ProgramPools, schedule: Schedule, clip_norm: float | None) -> None:
    """Compare with the emulator; leave the order behind where it differs."""
    found = pools.difference(schedule, clip_norm)
    assert found <= TOLERANCE, f"{found:.1e} with clip_norm={clip_norm}:\n{schedule}"


def may_clip(schedule: Schedule) -> bool:
    """Return whether no update comes before its gate's norm is complete."""
    gates = gates_of(schedule, clips=True)
    return not (schedule.body and early_updates(schedule, gates))


def run_drawn(pools: ProgramPools, seed: int, num_workers: int) -> None:
    """Draw an order by a seed, and run it; a failing one is kept."""
    random = Random(seed)
    schedule = random_schedule(random, num_workers)
    clip_norm = random.choice([None, 0.3]) if may_clip(schedule) else None
    try:
        run(pools, schedule, clip_norm)
    except AssertionError:
        if os.access(ORDERS, os.W_OK):
            (ORDERS / f"seed-{seed}.txt").write_text(f"{schedule}\n")
        raise


@pytest.mark.timeout(240)
@settings(NO_SHRINKING, max_examples=8)
@given(seed=SEEDS, num_workers=st.sampled_from([1, 2, 2, 4]))
def test_any_program_equals_the_emulator(
    pools: ProgramPools, seed: int, num_workers: int
) -> None:
    """Losses and weights of all nets, after some steps of AdamW in float64."""
    run_drawn(pools, seed, num_workers)


@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(NO_SHRINKING, max_examples=500)
@given(seed=SEEDS, num_workers=st.sampled_from([1, 2, 4, 8]))
def test_many_programs_equal_the_emulator(
    pools: ProgramPools, seed: int, num_workers: int
) -> None:
    """The same, for many more, on up to eight workers."""
    run_drawn(pools, seed, num_workers)


@pytest.mark.parametrize("path", sorted(ORDERS.glob("*.txt")), ids=lambda x: x.stem)
def test_kept_orders_equal_the_emulator(pools: ProgramPools, path: Path) -> None:
    """Orders that were written down for what they hold, or that failed once."""
    schedule = Schedule.parse(path.read_text())
    run(pools, schedule, None)
    if may_clip(schedule):
        run(pools, schedule, 0.3)


def prove_order(schedule: Schedule, *, clips: bool) -> None:
    """Plan all messages for links that pair them by their order."""
    plan = plan_to_play(schedule, clips=clips)
    refuse_unordered(plan)
    for part in plan.portions.values():
        plan_messages(plan, part)


def may_be_ordered(schedule: Schedule, *, clips: bool) -> bool:
    """Return whether links that pair messages by their order can carry its messages."""
    try:
        prove_order(schedule, clips=clips)
    except RunError:
        return False
    return True


def one_lane_each(num_workers: int) -> Iterator[Schedule]:
    """Orders with one lane on each device."""
    kept = (Schedule.parse(path.read_text()) for path in sorted(ORDERS.glob("*.txt")))
    drawn = (random_schedule(Random(seed), num_workers) for seed in range(40))
    for schedule in (*kept, *drawn):
        program = schedule.program
        fits = program.num_devices * program.num_pipelines == num_workers
        if fits and len(schedule.lanes) == program.num_devices > 1:
            yield schedule


@pytest.mark.timeout(200)
@pytest.mark.parametrize("clip_norm", [None, pytest.param(0.3, marks=pytest.mark.long)])
@pytest.mark.parametrize("num_workers", [2, pytest.param(4, marks=pytest.mark.long)])
def test_programs_equal_the_emulator_over_ordered_wires(
    num_workers: int, clip_norm: float | None, tmp_path: Path
) -> None:
    """Several nets, losses over the batch, gathered outputs, values read twice."""
    drawn = one_lane_each(num_workers)
    orders = [x for x in drawn if clip_norm is None or may_clip(x)]
    taken = [x for x in orders if may_be_ordered(x, clips=clip_norm is not None)]
    assert len(taken) > 0.7 * len(orders)
    orders = taken[:6]
    assert len(orders) > 5
    for found in answers_of(
        "ordered_workers:run_programs",
        [str(schedule) for schedule in orders],
        clip_norm,
        num_workers=num_workers,
        folder=tmp_path / "job",
        whole_s=180.0,
    ):
        assert max(found) <= TOLERANCE


def test_what_has_no_proved_order_is_refused() -> None:
    """Norms of replicas may come as late as their devices' updates."""
    schedule = next(
        x for x in one_lane_each(4) if may_clip(x) and not may_be_ordered(x, clips=True)
    )
    with pytest.raises(RunError, match="no order of messages over NCCL is proved"):
        prove_order(schedule, clips=True)
    assert may_be_ordered(schedule, clips=False)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_of_ours_can_be_ordered(name: str, *, clips: bool) -> None:
    """Each portion that is played, with replicas, whose norms come late."""
    schedule = make_schedule(
        name,
        num_devices=1 if SCHEDULES[name].is_data_parallel else 4,
        num_microbatches=1 if name == "pipedream" else 8,
        num_replicas=2,
        num_steps=6 if name in FLUSH_FREE else 1,
    )
    assert may_be_ordered(schedule, clips=clips)


@pytest.mark.parametrize("delay", [FROZEN, 0, 1, 2])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved-1f1b", "zb-h1"])
def test_every_filled_order_can_be_ordered(name: str, delay: int | None) -> None:
    """With replicas, and one gate over all of the student's stages."""
    student = make_schedule(name, num_devices=4, num_microbatches=8, num_replicas=2)
    program = with_teacher(student.program, 8, delay=delay, num_steps=4)
    filled = fill_with(student, program, costs=equal_costs(program, 0.7))
    assert may_be_ordered(filled, clips=False)


@settings(NO_SHRINKING, max_examples=60)
@given(seed=SEEDS, num_workers=st.sampled_from([2, 4, 8]))
def test_any_program_has_an_order_for_one_queue(seed: int, num_workers: int) -> None:
    """Each message may block all that its device is given later."""
    check(random_schedule(Random(seed), num_workers), links=Links.ONE_QUEUE)


def test_several_lanes_receive_through_gloo(tmp_path: Path) -> None:
    """gloo knows of a message only what is waited for: no lane may keep the others."""
    order = (ORDERS / "update-beside-forward.txt").read_text()
    for found in answers_of(
        "program_workers:run_all", [order], None, "torch", folder=tmp_path / "job"
    ):
        assert max(found) <= TOLERANCE


def test_a_pipeline_sends_a_skip_straight_to_its_reader(tmp_path: Path) -> None:
    """Stage 0 sends to stages 1 and 2; trained and evaluated as in one process."""
    for found in answers_of("skipping_workers:train", folder=tmp_path / "job"):
        assert max(found.values()) <= TOLERANCE


TWO_STAGES: Final = """
net n0 microbatches=2
stage 0 net=n0 device=0
stage 1 net=n0 device=1
flow 0>1

d0  0F0 0F1 0B0 0B1 0U
d1  1F0 1F1 1B0 1B1 1U
"""


def test_workers_that_differ_are_refused(tmp_path: Path) -> None:
    """Both ranks raise at the start, and say in what they differ."""
    answers = answers_of(
        "program_workers:refused_differences", TWO_STAGES, folder=tmp_path / "job"
    )
    for errors in answers:
        assert "ranks 0 and 1 differ in the schedule" in errors["schedule"]
        assert "differ in the weights of net n0" in errors["weights"]
        assert "differ in the updates of net n0" in errors["updates"]
        assert "differ in the seed" in errors["seed"]
