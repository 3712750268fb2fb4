"""Lanes of one device: any interleaving gives the same bits, and races are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hocket
from hocket.core.plans import lane_plan
from hocket.core.schedule import Schedule
from hocket.errors import ConfigError, RaceError, RunError
from hocket.passes import playable_order
from hocket.run.cluster.world import World
from hocket.run.device.cpu import CpuDevice
from hocket.run.device.sanitize import Sanitizer
from hocket.run.engine import worker_context
from hocket.run.engine.lanes import play_plan
from hocket.run.engine.program_run import ProgramRun
from tests.run.device.support.interleaver import Interleaver
from tests.run.support.forked import run_forked
from tests.run.support.joined import join
from tests.run.support.program_workers import arguments, make_batches
from tests.run.support.strict_wires import StrictWires

pytestmark = pytest.mark.timeout(60)

HEAD = """
net n0 microbatches=2
net n1 microbatches=2
stage 0 net=n0 device=0 trainable=no
stage 1 net=n1 device=0
stage 2 net=n1 device=0
flow 0>1
flow 1>2
"""
SPLIT = Schedule.parse(
    HEAD
    + """
d0    1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2U 1U
d0.1  0F0 0F1 2W0 1W0 2W1 1W1
"""
)
UNORDERED = Schedule.parse(
    HEAD
    + """
d0    0F0 1F0 2F0 0F1 1F1 2F1 2B0 1B0 2U 1U
d0.1  2B1 1B1
"""
)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A job of this process alone."""
    world = join()
    yield world
    world.close()


def trained(world: World, schedule: Schedule, **options: Any) -> list[Tensor]:
    """Train some steps; return losses and weights."""
    program = schedule.program
    batches = make_batches(program)
    run = ProgramRun(
        schedule, **arguments(program), example=batches[0], world=world, **options
    )
    with run:
        losses = [
            torch.tensor(result.loss, dtype=torch.float64)
            for result in run.train(batches)
        ]
        return [*losses, *run.state_dict()["n1"].values()]


def test_any_interleaving_gives_the_same_bits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six interleavings, each drawn from a seed, and the emulator to 1e-10."""
    expected = trained(world, SPLIT, sanitize=True)
    for seed in range(6):

        def open_device(*_: object, seed: int = seed, **__: object) -> CpuDevice:
            return CpuDevice(
                2,
                budget_bytes=1 << 30,
                timeout_s=10.0,
                scheduler=Interleaver(seed, 2),
                sanitizer=Sanitizer(2),
            )

        monkeypatch.setattr(worker_context, "open_device", open_device)
        found = trained(world, SPLIT)
        assert all(map(torch.equal, found, expected)), f"seed {seed}"
    alone = arguments(SPLIT.program)
    batches = make_batches(SPLIT.program)
    history = hocket.emulate(SPLIT.program, **alone, batches=batches)
    for loss, by_net in zip(expected, history, strict=False):
        assert loss.item() == pytest.approx(by_net["n1"]["loss"], rel=1e-10)


def test_links_that_need_one_order_refuse_several_lanes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL: which lane posts first would differ from what other ranks planned."""

    def pair_wires(*_: object) -> StrictWires:
        return StrictWires((), world.rank, 10.0)

    monkeypatch.setattr("hocket.run.comm.transports.pair_wires", pair_wires)
    with pytest.raises(RunError, match=r"2 lanes on 1 devices, .*HOCKET_BACKEND=gloo"):
        trained(world, SPLIT)


def test_an_update_that_does_not_wait_for_gradients_is_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the run is lucky, the error names both ops, lanes and the gradients."""
    plan = lane_plan.plan_lanes

    def without_waits(*args: Any) -> Any:
        return tuple(
            tuple(
                dataclasses.replace(op, waits=()) if op.op.kind.value == "U" else op
                for op in lane
            )
            for lane in plan(*args)
        )

    monkeypatch.setattr(play_plan, "plan_lanes", without_waits)
    with pytest.raises(RaceError, match=r"gradients\[stage 2, step 0\]") as caught:
        trained(world, SPLIT, sanitize=True)
    assert set(caught.value.lanes) == {0, 1}
    assert {op[:2] for op in caught.value.ops} == {"2W", "2U"}


def test_two_backwards_that_no_event_orders_are_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`check` refuses the order; played all the same, its race is found."""
    with pytest.raises(hocket.ScheduleError, match="2B0"):
        trained(world, UNORDERED, sanitize=True)
    monkeypatch.setattr(playable_order, "check", lambda _: None)
    monkeypatch.setattr(worker_context, "buffers_needed", lambda *_, **__: 4)
    with pytest.raises(RaceError, match="gradients") as caught:
        trained(world, UNORDERED, sanitize=True)
    assert {op[1] for op in caught.value.ops} == {"B"}
    assert set(caught.value.lanes) == {0, 1}


def test_sanitize_needs_several_lanes(world: World) -> None:
    """A setting without effect is refused."""
    order = Schedule.parse(
        "net n0 microbatches=1\nstage 0 net=n0 device=0\n\nd0  0F0 0B0 0U"
    )
    with pytest.raises(ConfigError, match="each of the 1 devices"):
        trained(world, order, sanitize=True)


@pytest.mark.timeout(180)
def test_the_first_error_ends_the_waits_of_other_lanes(tmp_path: Path) -> None:
    """A lane that waits for a peer ends long before its timeout, with that error."""
    outcome = run_forked("lane_failure_workers:train", folder=tmp_path, timeout_s=50.0)
    assert outcome.reports[0].kind == "ValueError"
    assert "the second lane has failed" in outcome.reports[0].message
    assert "rank 0 is gone" in outcome.reports[1].message
