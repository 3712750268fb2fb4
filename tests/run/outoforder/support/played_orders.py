"""Random legal orders of a captured step, and how they are played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from time import sleep
from typing import Any, Final

import torch
from torch import Tensor, nn

from hocket.core.dataflow import makes, needs
from hocket.core.footprint import Footprint, MemoryPlan, plan_memory
from hocket.core.op import Kind
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule
from hocket.model.profile.allocations import allocations
from hocket.passes.serial import serial
from hocket.run.device.cpu import CpuDevice
from hocket.run.device.device import Device, Work
from hocket.run.device.sanitize import Sanitizer
from hocket.run.outoforder.capture.captured_step import (
    CapturedStep,
    OptimizerStates,
    StepTensors,
    capture_step,
    preserved,
)
from hocket.run.outoforder.order.choose import with_work_bytes
from hocket.run.outoforder.play.step_replay import StepPlayer, StepValues
from tests.run.device.support.interleaver import Interleaver
from tests.run.outoforder.support.inline_device import InlineDevice
from tests.run.outoforder.support.small_steps import loss

_BYTES: Final = 2**40
_TIMEOUT_S: Final = 30.0


def random_order(program: Program, random: Random) -> Schedule:
    """Return any legal order of one step in two lanes."""
    left = list(serial(program).lanes[0].ops)
    made = {value for op in left for value in makes(op, program)}
    lanes: tuple[list[Any], list[Any]] = [], []
    while left:
        ready = [op for op in left if made.isdisjoint(needs(op, program))]
        op = random.choice(ready)
        left.remove(op)
        made.difference_update(makes(op, program))
        lanes[random.random() < 0.4].append(op)
    ops = (tuple(lane) for lane in lanes)
    return Schedule(program, tuple(Lane(0, i, x) for i, x in enumerate(ops) if x))


def random_part(program: Program, random: Random) -> Schedule:
    """Return the repeating part of any legal order with W and U of some stages late."""
    waiting = {x for x in range(program.num_stages) if random.random() < 0.5}
    whole = replace(program, num_steps=2)
    ops = serial(program).lanes[0].ops
    carried = [
        op
        for op in ops
        if op.stage in waiting and op.kind in (Kind.BACKWARD_WEIGHT, Kind.UPDATE)
    ]
    left = [*carried, *(replace(op, step=1) for op in ops if op not in carried)]
    made = {value for op in left for value in makes(op, whole)}
    lanes: tuple[list[Any], list[Any]] = [], []
    while left:
        ready = [op for op in left if made.isdisjoint(needs(op, whole))]
        op = random.choice(ready)
        left.remove(op)
        made.difference_update(makes(op, whole))
        lanes[random.random() < 0.4].append(op)
    return Schedule(
        whole, tuple(Lane(0, i, tuple(x)) for i, x in enumerate(lanes) if x)
    )


def free_device(num_lanes: int) -> CpuDevice:
    """Lanes that run freely, without checks."""
    return CpuDevice(num_lanes, budget_bytes=_BYTES, timeout_s=_TIMEOUT_S)


def checked_device(num_lanes: int, seed: int) -> CpuDevice:
    """Lanes in an interleaving drawn from a seed, with all accesses checked."""
    return CpuDevice(
        num_lanes,
        budget_bytes=_BYTES,
        timeout_s=_TIMEOUT_S,
        scheduler=Interleaver(seed, num_lanes),
        sanitizer=Sanitizer(num_lanes),
    )


def delayed_device(num_lanes: int, seed: int) -> CpuDevice:
    """Lanes that run freely, each op after a random delay, with all checked."""
    random = Random(seed)

    def late(work: Work, label: str) -> None:
        sleep(random.choice((0.0, 0.0, 1e-3)))
        work()

    return CpuDevice(
        num_lanes,
        budget_bytes=_BYTES,
        timeout_s=_TIMEOUT_S,
        run_op=late,
        sanitizer=Sanitizer(num_lanes),
    )


class TrainedByHand:
    """A model whose optimizer has made a step, captured.

    Args:
        model: is trained.
        make: makes the optimizer.
        batches: the first is trained on at once, as torch does.
        fuses_lstm: see `capture_step`.
    """

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[Any], torch.optim.Optimizer],
        batches: Sequence[Any],
        *,
        fuses_lstm: bool = False,
    ) -> None:
        torch.manual_seed(3)
        self.model, self.optimizer = model, make(model.parameters())
        self._batches = batches[1:]
        loss(model(batches[0][0]), batches[0][1]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step: CapturedStep = capture_step(
            model, loss, self.optimizer, batches[0], fuses_lstm=fuses_lstm
        )
        states = OptimizerStates(self.optimizer, dict(model.named_parameters()))
        self._tensors = StepTensors(self.step, model, self.optimizer, states)
        assert states.bind()

    @property
    def program(self) -> Program:
        """The step's program."""
        return self.step.regions.program

    @property
    def given(self) -> dict[str, Tensor]:
        """The tensors of a step on the second batch."""
        return self._tensors.given(self._batches[0])

    def footprint(self) -> Footprint:
        """Return the memory of all ops, the kernels' included."""
        plan = plan_memory(serial(self.program), self.step.code.footprint)
        device = InlineDevice(1)
        player = self._player(plan, device)
        footprint = self.step.code.footprint
        return with_work_bytes(player, plan, footprint, self.given, device)

    def _player(self, plan: MemoryPlan, device: Device) -> StepPlayer:
        losses = frozenset(self.step.losses.values())
        return StepPlayer(self.step.code, losses, self.step.written, plan, device)

    def allocated_bytes(self, plan: MemoryPlan) -> int:
        """Return the most that the allocator gives out at once in one step."""
        device = InlineDevice()
        player = self._player(plan, device)
        given = self.given
        first, second = StepValues(given, {}), StepValues(given, {})
        with allocations(device.torch_device) as log:
            player.play_part(first, None)
            old = first if player.carries else None
            with log.span():
                player.play_part(second, old)
        return log.peaks[0] + plan.kept_bytes

    def play(
        self, schedule: Schedule, device: CpuDevice, plan: MemoryPlan | None = None
    ) -> dict[str, Tensor]:
        """Train on all other batches in this order; return a copy of all tensors.

        Afterwards all tensors are what they were before.
        """
        plan = plan or plan_memory(schedule, self.step.code.footprint)
        player, tensors = self._player(plan, device), self._tensors
        with device, preserved([*tensors.state.values()]):
            torch.manual_seed(4)
            for batch in self._batches:
                player.play(tensors.given(batch))
            return {name: tensor.clone() for name, tensor in tensors.state.items()}

    def play_across(self, part: Schedule, device: CpuDevice) -> dict[str, Tensor]:
        """Do the same with the repeating part of an order."""
        plan = plan_memory(part, self.step.code.footprint)
        player, tensors = self._player(plan, device), self._tensors
        old: StepValues | None = None
        with device, preserved([*tensors.state.values()]):
            torch.manual_seed(4)
            for batch in self._batches:
                new = StepValues(tensors.given(batch), {})
                player.play_part(new, old)
                old = new
            player.play_part(None, old)
            return {name: tensor.clone() for name, tensor in tensors.state.items()}
