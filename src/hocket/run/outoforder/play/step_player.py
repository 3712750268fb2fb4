"""Plays one step in the lanes of a device, and frees each value after its last reader.

    host      submits 0F0 1F0 1I0 1W0 ...     and events where lanes wait for others
    lane 0    0F0  1F0  1I0 ──event──┐  0I0   takes its inputs out of the store, and
    lane 1                           └▶ 1W0   puts its outputs there

Values that several lanes read are released by the lane that made them, when it knows
that all readers are done (`core/footprint.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from hocket.core.footprint import MemoryPlan, issue_order
from hocket.core.op import Op
from hocket.run.device.device import Device, Event, IssueOrder
from hocket.run.outoforder.capture.code import RegionCode, StepCode
from hocket.run.outoforder.capture.regions import RegionKey

Tensors: TypeAlias = Mapping[str, Tensor]
AroundOp: TypeAlias = Callable[[int, Op, Callable[[], None]], None]

_ALL_ONES = 0xFF  # as a byte of a number: not a number, or -1


def call_op(lane: int, op: Op, run: Callable[[], None]) -> None:
    """Run an op, and nothing around it."""
    run()


@dataclass(frozen=True, slots=True)
class StepValues:
    """The tensors of one step, by name.

    Args:
        given: those that no region makes.
        store: those that regions have made, and others still read.
    """

    given: Tensors
    store: dict[str, Tensor]


class StepPlayer:
    """Plays steps of one order.

    Args:
        code: the functions of the step's regions.
        results: the names of values to return: losses.
        written: for each region, the given tensors that it changes in place.
        plan: the order, and its waits and releases.
        device: has as many lanes as the order. With a sanitizer, each access is
            checked, and released memory is overwritten.
    """

    def __init__(
        self,
        code: StepCode,
        results: frozenset[str],
        written: Mapping[RegionKey, frozenset[str]],
        plan: MemoryPlan,
        device: Device,
    ) -> None:
        self._code, self._results, self._written = code, results, written
        self._plan, self._device = plan, device
        self._waited_for = {op for waits in plan.waits.values() for op in waits}
        self._members: defaultdict[int, list[str]] = defaultdict(list)
        for name, block in code.block_of.items():
            self._members[block].append(name)
        self._issued = [*issue_order(plan.schedule, plan.waits)]
        if device.issue_order is IssueOrder.SIDE_LANES_FIRST:
            self._issued.sort(key=lambda issued: -issued[0])

    @property
    def carries(self) -> bool:
        """Whether W and U of some stages run in the next step."""
        return bool(self._plan.carried)

    def play(self, given: Tensors, around: AroundOp = call_op) -> dict[str, Tensor]:
        """Play one step; it returns when all lanes are joined.

        Args:
            given: all tensors that no region makes.
            around: runs each op, given its lane.

        Returns:
            The losses, by the names of their values.

        Raises:
            RunError: an op failed.
        """
        return self.play_part(StepValues(given, {}), None, around)

    def play_part(
        self,
        new: StepValues | None,
        old: StepValues | None,
        around: AroundOp = call_op,
    ) -> dict[str, Tensor]:
        """Play a step's ops, and those carried over from the step before.

        Ops of a step that is None only pass on events: in the first step the carried
        ones, and in the end all others.

        Args:
            new: the step; what is kept of it for carried ops is left in its store.
            old: the step before; its store is emptied.
            around: runs each op, given its lane.

        Returns:
            The losses, by the names of their values.

        Raises:
            RunError: an op failed.
        """
        device, plan = self._device, self._plan
        events: defaultdict[Op, Event] = defaultdict(device.new_event)
        results: dict[str, Tensor] = {}
        device.fork()
        try:
            for lane, op in self._issued:
                values = old if op in plan.carried else new
                run = partial(self._run, lane, op, values, old, results)
                device.lanes[lane].submit(
                    partial(around, lane, op, run),
                    waits=[events[other] for other in plan.waits[op]],
                    records=[events[op]] if op in self._waited_for else [],
                    label=str(op),
                )
        finally:
            device.join()
        if old is not None:
            old.store.clear()
        if new is not None:
            self._drop_rest(new.store)
        return results

    def _drop_rest(self, store: dict[str, Tensor]) -> None:
        """Drop what no lane knew to be read, and is not kept for the next step."""
        for name in [*store]:
            if self._code.block_of[name] not in self._plan.kept:
                del store[name]

    def _run(
        self,
        lane: int,
        op: Op,
        values: StepValues | None,
        old: StepValues | None,
        results: MutableMapping[str, Tensor],
    ) -> None:
        plan = self._plan
        store = None if values is None else values.store
        before = plan.before.get(op, ())
        if old is not None:
            blocks = [block for block in before if block in plan.kept]
            self._overwrite(self._taken(lane, op, blocks, old.store, is_old=True))
        if values is None or store is None:
            return
        is_old = op in plan.carried
        blocks = [block for block in before if block not in plan.kept]
        self._overwrite(self._taken(lane, op, blocks, store, is_old=is_old))
        code = self._code.regions.get(RegionKey(op.kind, op.stage))
        if code is None:
            return
        self._check_accesses(lane, op, code)
        given = values.given
        inputs = [given[x] if x in given else store[x] for x in code.inputs]
        blocks = [*plan.within.get(op, ())]
        released = self._taken(lane, op, blocks, store, is_old=is_old)
        with torch.no_grad():
            made = code.run(inputs)
        for name, tensor in zip(code.outputs, made, strict=True):
            (results if name in self._results else store)[name] = tensor
        self._overwrite(released)

    def _taken(
        self,
        lane: int,
        op: Op,
        blocks: Iterable[int],
        store: MutableMapping[str, Tensor],
        *,
        is_old: bool,
    ) -> list[Tensor]:
        """Take blocks out of the store; return their tensors to overwrite them."""
        names = [x for block in blocks for x in self._members[block] if x in store]
        taken = [store.pop(name) for name in names]
        sanitizer = self._device.sanitizer
        if sanitizer is None:
            return []
        for name in names:
            sanitizer.access(lane, str(op), self._seen_as(name, is_old), writes=True)
        return taken

    def _overwrite(self, released: Iterable[Tensor]) -> None:
        for tensor in released:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            whole.set_(tensor.untyped_storage()).fill_(_ALL_ONES)

    def _check_accesses(self, lane: int, op: Op, code: RegionCode) -> None:
        sanitizer = self._device.sanitizer
        if sanitizer is None:
            return
        written = self._written.get(RegionKey(op.kind, op.stage), frozenset())
        is_old = op in self._plan.carried
        for name in code.inputs:
            seen = self._seen_as(name, is_old)
            sanitizer.access(lane, str(op), seen, writes=name in written)
        for name in code.outputs:
            sanitizer.access(lane, str(op), self._seen_as(name, is_old), writes=True)

    def _seen_as(self, name: str, is_old: bool) -> str:
        """Return a tensor's name in the sanitizer: each step has its own values."""
        return f"{name} before" if is_old and name in self._code.block_of else name
