"""Runs one order of a step again and again, and frees each value after its last reader.

    host      submits 0F0 1F0 1I0 1W0 ...     and events where lanes wait for others
    lane 0    0F0  1F0  1I0 ──event──┐  0I0   takes its inputs out of the store, and
    lane 1                           └▶ 1W0   puts its outputs there

Values that several lanes read are released by the lane that made them, when it knows
that all readers are done (`core/footprint.py`).

On a device with graphs, the step is captured once. The graph reads the tensors that it
was captured with: a batch is copied into them, and rates are changed in place.
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
from hocket.run.device.device import Device, Event, IssueOrder, Work
from hocket.run.outoforder.capture.code import RegionCode, StepCode
from hocket.run.outoforder.capture.regions import RegionKey

_TIMEOUT_S = 600.0


@dataclass(eq=False)
class StepReplay:
    """Runs steps of one order.

    Where W and U of a step run in the next one, what these read is kept until then. A
    graph reads it from tensors that stay the same, into which it copies it at its end.

    Args:
        player: plays the order.
        given: the tensors of the step. Their values may change in between, and on a
            device with graphs they stay the same tensors.
        device: the device.
        changing: the names of given tensors that the next step overwrites: rates, and
            on a device with graphs the batch.
    """

    player: StepPlayer
    given: Tensors
    device: Device
    changing: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._results: Mapping[str, Tensor] = {}
        self._replay: Work | None = None
        self._old: StepValues | None = None
        self._is_open = False  # whether W and U of a step wait for the next one

    def capture(self) -> None:
        """Capture the step as a graph; a step runs first, so weights change."""
        lane = self.device.lanes[0]
        self._play_eagerly(self.given)  # for the libraries' workspaces of each lane
        if self._is_open:
            self._play()
        self.device.synchronize(_TIMEOUT_S)
        self._replay = self.device.capture_graph(lane, self._play)

    def run(self, given: Tensors | None = None) -> Mapping[str, Tensor]:
        """Run one step; return its losses, by the names of their values.

        Args:
            given: other tensors, where no graph is captured.
        """
        is_first = self.player.carries and not self._is_open
        if self._replay is None or is_first:
            return self._play_eagerly(self.given if given is None else given)
        self.device.fork()
        self.device.lanes[0].submit(self._replay, label="step")
        self.device.join()
        return self._results

    def watch(
        self,
        given: Tensors,
        around: Callable[[dict[str, Tensor], Op, Callable[[], None]], None],
    ) -> Mapping[str, Tensor]:
        """Play one step op by op, with all its W and U; return its losses.

        Args:
            given: the tensors of the step.
            around: runs each op, given what the ops before it have made, by name.
        """
        values = StepValues(given, {})

        def run(lane: int, op: Op, play: Callable[[], None]) -> None:
            around(values.store, op, play)

        results = self.player.play_part(values, None, run)
        if self.player.carries:
            self.player.play_part(None, values, run)
        return results

    def finish(self) -> None:
        """Run the W and U that wait for the next step."""
        if self._is_open and self._old is not None:
            self.player.play_part(None, self._copy_of_old(self._old))
        self.forget()

    def forget(self) -> None:
        """Drop the W and U that wait for the next step: the weights are others now."""
        self._is_open = False

    def _play_eagerly(self, given: Tensors) -> Mapping[str, Tensor]:
        new = StepValues(given, {})
        old = self._copy_of_old(self._old) if self._is_open and self._old else None
        results = self.player.play_part(new, old)
        if self.player.carries:
            self._keep(new)
            self._is_open = True
        return results

    def _play(self) -> None:
        assert self._old is not None or not self.player.carries
        new = StepValues(self.given, {})
        old = None if self._old is None else self._copy_of_old(self._old)
        self._results = self.player.play_part(new, old)
        if self.player.carries:
            self._keep(new)

    def _copy_of_old(self, old: StepValues) -> StepValues:
        """Return the same tensors, in a store that a step may empty."""
        store = dict(old.store)
        if not self.device.has_graphs:
            old.store.clear()  # each is freed where it is read last
        return StepValues(old.given, store)

    def _keep(self, new: StepValues) -> None:
        """Keep what the next step reads of this one."""
        if self._old is not None and self.device.has_graphs:
            for name in self.changing:
                self._old.given[name].copy_(new.given[name])
            for name, tensor in new.store.items():
                self._old.store[name].copy_(tensor)
            return
        copies = {name: new.given[name].clone() for name in self.changing}
        self._old = StepValues({**new.given, **copies}, new.store)


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


@dataclass(eq=False)
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

    code: StepCode
    results: frozenset[str]
    written: Mapping[RegionKey, frozenset[str]]
    plan: MemoryPlan
    device: Device

    def __post_init__(self) -> None:
        self._waited_for = {op for waits in self.plan.waits.values() for op in waits}
        self._members: defaultdict[int, list[str]] = defaultdict(list)
        for name, block in self.code.block_of.items():
            self._members[block].append(name)
        self._issued = [*issue_order(self.plan.schedule, self.plan.waits)]
        if self.device.issue_order is IssueOrder.SIDE_LANES_FIRST:
            self._issued.sort(key=lambda issued: -issued[0])

    @property
    def carries(self) -> bool:
        """Whether W and U of some stages run in the next step."""
        return bool(self.plan.carried)

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
        self, new: StepValues | None, old: StepValues | None, around: AroundOp = call_op
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
        device, plan = self.device, self.plan
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
            if self.code.block_of[name] not in self.plan.kept:
                del store[name]

    def _run(
        self,
        lane: int,
        op: Op,
        values: StepValues | None,
        old: StepValues | None,
        results: MutableMapping[str, Tensor],
    ) -> None:
        plan = self.plan
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
        code = self.code.regions.get(RegionKey(op.kind, op.stage))
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
            (results if name in self.results else store)[name] = tensor
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
        sanitizer = self.device.sanitizer
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
        sanitizer = self.device.sanitizer
        if sanitizer is None:
            return
        written = self.written.get(RegionKey(op.kind, op.stage), frozenset())
        is_old = op in self.plan.carried
        for name in code.inputs:
            seen = self._seen_as(name, is_old)
            sanitizer.access(lane, str(op), seen, writes=name in written)
        for name in code.outputs:
            sanitizer.access(lane, str(op), self._seen_as(name, is_old), writes=True)

    def _seen_as(self, name: str, is_old: bool) -> str:
        """Return a tensor's name in the sanitizer: each step has its own values."""
        return f"{name} before" if is_old and name in self.code.block_of else name
