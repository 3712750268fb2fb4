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
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from hocket.core.footprint import MemoryPlan, issue_order
from hocket.core.op import Op
from hocket.run.device.device import Device, Event, IssueOrder
from hocket.run.outoforder.capture.code import RegionCode, StepCode
from hocket.run.outoforder.capture.regions import Place

Tensors: TypeAlias = Mapping[str, Tensor]
AroundOp: TypeAlias = Callable[[int, Op, Callable[[], None]], None]

_ALL_ONES = 0xFF  # as a byte of a number: not a number, or -1


def call_op(lane: int, op: Op, run: Callable[[], None]) -> None:
    """Run an op, and nothing around it."""
    run()


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
        written: Mapping[Place, frozenset[str]],
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
        device, plan = self._device, self._plan
        events: defaultdict[Op, Event] = defaultdict(device.new_event)
        store: dict[str, Tensor] = {}
        results: dict[str, Tensor] = {}
        device.fork()
        try:
            for lane, op in self._issued:
                run = partial(self._run, lane, op, given, store, results)
                device.lanes[lane].submit(
                    partial(around, lane, op, run),
                    waits=[events[other] for other in plan.waits[op]],
                    records=[events[op]] if op in self._waited_for else [],
                    label=str(op),
                )
        finally:
            device.join()
        return results

    def _run(
        self,
        lane: int,
        op: Op,
        given: Tensors,
        store: MutableMapping[str, Tensor],
        results: MutableMapping[str, Tensor],
    ) -> None:
        self._overwrite(self._taken(lane, op, self._plan.before.get(op, ()), store))
        code = self._code.regions.get(Place(op.kind, op.stage))
        if code is None:
            return
        self._check_accesses(lane, op, code)
        inputs = [given[x] if x in given else store[x] for x in code.inputs]
        released = self._taken(lane, op, self._plan.within.get(op, ()), store)
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
    ) -> list[Tensor]:
        """Take blocks out of the store; return their tensors to overwrite them."""
        names = [x for block in blocks for x in self._members[block] if x in store]
        taken = [store.pop(name) for name in names]
        sanitizer = self._device.sanitizer
        if sanitizer is None:
            return []
        for name in names:
            sanitizer.access(lane, str(op), name, writes=True)
        return taken

    def _overwrite(self, released: Iterable[Tensor]) -> None:
        for tensor in released:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            whole.set_(tensor.untyped_storage()).fill_(_ALL_ONES)

    def _check_accesses(self, lane: int, op: Op, code: RegionCode) -> None:
        sanitizer = self._device.sanitizer
        if sanitizer is None:
            return
        written = self._written.get(Place(op.kind, op.stage), frozenset())
        for name in code.inputs:
            sanitizer.access(lane, str(op), name, writes=name in written)
        for name in code.outputs:
            sanitizer.access(lane, str(op), name, writes=True)
