"""Where a stage's inputs come from, and where its outputs go.

    from another device ──▶ │       │ ──▶ to another device
                            │ stage │
    from a stage here   ──▶ │       │ ──▶ to a stage here

Which of them it is follows from the program and does not change from step to step, so
it is looked up once. The other way round, gradients take the same ways back. A message
to a device holds what all of its stages read; each takes its part.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import torch
from torch import Tensor

from hocket.core.dataflow import Fact, Rule, need_rules
from hocket.core.op import Kind
from hocket.core.program import Program
from hocket.run.data.step_batch import NetBatches
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.engine.lanes.point_to_point import PointToPoint, Route
from hocket.run.engine.lanes.wiring import Places, Wiring

Values: TypeAlias = tuple[Tensor, ...]
Key: TypeAlias = tuple[int, int]  # step, microbatch
_OP_G: Final = -1  # in the place of a stage that reads outputs
# Values between stages of one device, by fact, stage that makes and stage that reads.
Near: TypeAlias = dict[tuple[Fact, int, int], dict[Key, Values]]


class Input(ABC):
    """One of the places that values for a stage come from."""

    @abstractmethod
    def take(self, batch: NetBatches, microbatch: int) -> Values:
        """Return a microbatch's values; waits for them where another device sends."""

    @abstractmethod
    def release(self, batch: NetBatches, microbatch: int) -> None:
        """Release the memory of a microbatch's values."""


class NearInput(Input):
    """Values of another stage of this device.

    Args:
        values: where that stage's op puts them.
        net: the net of the stage that makes them.
    """

    def __init__(self, values: dict[Key, Values], net: str) -> None:
        self._values = values
        self._net = net

    def take(self, batch: NetBatches, microbatch: int) -> Values:
        """See `Input.take`; they are there."""
        return self._values.pop(batch[self._net].step.place_of(microbatch), ())

    def release(self, batch: NetBatches, microbatch: int) -> None:
        """See `Input.release`; there is nothing to release."""


class FarInput(Input):
    """Values of a stage of another device.

    One message may serve several stages of this device: the first that takes it waits,
    and the last that releases it frees the buffer.

    Args:
        channels: this device's messages.
        fact: what the values are.
        stage: the stage that makes them.
        net: the net of the stage that makes them.
        counts: for how many microbatches each stage of this device reads them.
        recorder: notes that a wait is over.
    """

    def __init__(
        self,
        channels: PointToPoint,
        fact: Fact,
        stage: int,
        net: str,
        counts: Sequence[int],
        recorder: FlightRecorder,
    ) -> None:
        self._channels = channels
        self._fact = fact
        self._stage = stage
        self._net = net
        self._counts = counts
        self._is_shared = len(counts) > 1
        self._recorder = recorder
        self._locks: dict[Key, threading.Lock] = {}  # of what several readers share
        self._shared: dict[Key, Values] = {}
        self._num_released: dict[Key, int] = {}

    def take(self, batch: NetBatches, microbatch: int) -> Values:
        """See `Input.take`."""
        if not self._is_shared:
            values = self._channels.receive(self._fact, self._stage, batch, microbatch)
            self._recorder.resume()
            return values
        key = batch[self._net].step.place_of(microbatch)
        with self._locks.setdefault(key, threading.Lock()):
            if key not in self._shared:
                values = self._channels.receive(
                    self._fact, self._stage, batch, microbatch
                )
                self._recorder.resume()
                self._shared[key] = values
            return tuple(value.clone() for value in self._shared[key])

    def release(self, batch: NetBatches, microbatch: int) -> None:
        """See `Input.release`."""
        if self._is_shared:
            key = batch[self._net].step.place_of(microbatch)
            with self._locks[key]:
                count = self._num_released.pop(key, 0) + 1
                if count < sum(microbatch < other for other in self._counts):
                    self._num_released[key] = count
                    return
                del self._shared[key], self._locks[key]
        self._channels.release(self._fact, self._stage, batch, microbatch)


@dataclass(frozen=True, slots=True)
class PartInput(Input):
    """Some of the values of a message.

    Args:
        whole: all of them.
        places: which.
    """

    whole: FarInput
    places: Places

    def take(self, batch: NetBatches, microbatch: int) -> Values:
        """See `Input.take`."""
        values = self.whole.take(batch, microbatch)
        return tuple(values[place] for place in self.places)

    def release(self, batch: NetBatches, microbatch: int) -> None:
        """See `Input.release`."""
        self.whole.release(batch, microbatch)


class RegroupedInput(Input):
    """Values of a net with other microbatches than the stage that reads them.

        maker's     0   1 │ 2   3        maker's     0       │ 1
        reader's      0   │   1          reader's    0 │  1  │ 2 │  3

    Several are joined along dimension 0. What several of the reader's microbatches read
    is kept until the last of them has taken it: each takes its rows, or all.

    Args:
        source: the values of the maker's microbatches.
        rule: which of them a microbatch of the reader reads.
        reader: the net of the stage that reads them.
        takes_all: whether each reader takes the whole value, and not its own rows.
        joins_once: whether readers share one joined tensor. False where they are in
            several lanes, since no event says that another lane's join is done.
    """

    def __init__(
        self,
        source: Input,
        rule: Rule,
        reader: str,
        *,
        takes_all: bool,
        joins_once: bool,
    ) -> None:
        self._source = source
        self._rule = rule
        self._reader = reader
        self._takes_all = takes_all
        self._joins_once = joins_once
        self._locks: dict[Key, threading.Lock] = {}  # for forwards in two lanes
        # By the first of a group's readers; of each microbatch of the maker, or joined.
        self._kept: dict[Key, list[Values]] = {}
        self._num_taken: dict[Key, int] = {}

    def take(self, batch: NetBatches, microbatch: int) -> Values:
        """See `Input.take`."""
        work, num_readers = batch[self._reader], self._rule.num_readers
        group = microbatch // num_readers
        key = work.step.place_of(group * num_readers)
        num_read = self._rule.num_read
        numbers = range(group * num_read, (group + 1) * num_read)
        with self._locks.setdefault(key, threading.Lock()):
            if key not in self._kept:
                parts = [self._source.take(batch, number) for number in numbers]
                self._kept[key] = [_joined(parts)] if self._joins_once else parts
            parts = self._kept[key]
            values = parts[0] if self._joins_once else _joined(parts)
            self._num_taken[key] = self._num_taken.get(key, 0) + 1
            if self._num_taken[key] == num_readers:
                del self._kept[key], self._num_taken[key], self._locks[key]
                for number in numbers:
                    self._source.release(batch, number)
        if self._takes_all or num_readers == 1:
            return values
        own, first = (
            work.microbatches[microbatch],
            work.microbatches[group * num_readers],
        )
        rows = own.first_row - first.first_row, own.num_samples
        return tuple(value.narrow(0, *rows) for value in values)

    def release(self, batch: NetBatches, microbatch: int) -> None:
        """See `Input.release`; `take` has released the source."""


def _joined(parts: Sequence[Values]) -> Values:
    """Join the values of several microbatches, into new tensors."""
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


@dataclass(frozen=True, slots=True)
class _Way:
    """One of the ways that results go.

    Args:
        to: a channel to another device, or where a stage of this device looks.
        places: which of the results; None for all.
        count: for how many microbatches they are read.
    """

    to: Route | dict[Key, Values]
    places: Places | None
    count: int


class Output:
    """The places that one kind of a stage's results goes to.

    Args:
        channels: this device's messages.
        net: the stage's net.
        far: to other devices.
        near: to stages of this device.
        copies: whether values may lie in a buffer that is released when the op has
            ended, so that a stage here needs copies.
    """

    def __init__(
        self,
        channels: PointToPoint,
        net: str,
        far: Sequence[_Way],
        near: Sequence[_Way],
        *,
        copies: bool,
    ) -> None:
        self._channels = channels
        self._net = net
        self._far = far
        self._near = near
        self._copies = copies

    def put(
        self, batch: NetBatches, lane: int, microbatch: int, values: Values
    ) -> None:
        """Hand on what an op made for a microbatch.

        Args:
            batch: the batch of each net.
            lane: the lane that the op is in.
            microbatch: the microbatch.
            values: what the op made.
        """
        for way in self._far:
            if microbatch < way.count:
                assert isinstance(way.to, tuple)
                self._channels.send(
                    way.to, lane, batch, microbatch, _picked(values, way.places)
                )
        copies = self._copies
        for way in self._near:
            if microbatch < way.count:
                assert isinstance(way.to, dict)
                key = batch[self._net].step.place_of(microbatch)
                some = _picked(values, way.places)
                way.to[key] = tuple(x.clone() for x in some) if copies else some
                copies = True  # a stage may change what it reads in place


def _picked(values: Values, places: Places | None) -> Values:
    return values if places is None else tuple(values[place] for place in places)


class InputMaker:
    """Makes the inputs and outputs of one device's stages.

    Args:
        program: says which stages follow each other, and where they live.
        wiring: which values go along each flow.
        device: this worker's.
        channels: its messages.
        recorder: notes that waits are over.
        has_lanes: whether the device has several lanes.
    """

    def __init__(
        self,
        program: Program,
        wiring: Wiring,
        device: int,
        channels: PointToPoint,
        recorder: FlightRecorder,
        *,
        has_lanes: bool,
    ) -> None:
        self._has_lanes = has_lanes
        self._program = program
        self._wiring = wiring
        self._device = device
        self._channels = channels
        self._recorder = recorder
        self._near: Near = {}
        self._far: dict[tuple[Fact, int], FarInput] = {}

    def output_of(self, source: int, stage: int) -> Input:
        """Return where a stage finds the outputs of another one."""
        return self._input(Fact.OUTPUT, source, stage)

    def input_of(self, source: int, stage: int) -> Input:
        """Return where a stage's forward finds the outputs of another one."""
        program = self._program
        takes_all = (source, stage) in program.whole_batch_flows
        rule = next(
            rule
            for rule in need_rules(Kind.FORWARD, stage, program)
            if rule.stage == source and rule.fact in {Fact.OUTPUT, Fact.GATHERED}
        )
        found = self._input(rule.fact, source, stage)
        if rule.fact is Fact.GATHERED:  # one per step, which all microbatches read
            rule = replace(rule, num_readers=program.num_microbatches_of(stage))
        if not takes_all and rule.num_read == rule.num_readers == 1:
            return found
        return RegroupedInput(
            found,
            rule,
            program.stages[stage].net,
            takes_all=takes_all,
            joins_once=not self._has_lanes,
        )

    def gathered_of(self, source: int, stage: int) -> Input:
        """Return where a stage's loss finds gathered outputs."""
        return self._input(Fact.GATHERED, source, stage)

    def gradient_of(self, target: int, stage: int) -> Input:
        """Return where a stage finds the gradients that another one made."""
        return self._input(Fact.INPUT_GRAD, target, stage)

    def loss_gradient(self, stage: int) -> dict[Key, Values]:
        """Return where the loss over a whole batch leaves gradients for a stage."""
        return self._near.setdefault((Fact.LOSS_GRAD, stage, stage), {})

    def own_output(self, stage: int) -> Input:
        """Return where op G finds a stage's outputs."""
        return self._input(Fact.OUTPUT, stage, _OP_G)

    def output(self, stage: int, *, copies: bool) -> Output:
        """Return where a stage's outputs go."""
        program = self._program
        readers = [*self._readers(Fact.OUTPUT, stage)]
        if stage in program.loss_stages and not program.gathers(stage):
            readers.append(stage)
        if stage in program.gathered_stages:
            readers.append(_OP_G)
        return self._output(Fact.OUTPUT, stage, readers, copies=copies)

    def gathered(self, stage: int) -> Output:
        """Return where a stage's gathered outputs go."""
        read = (*self._program.targets[stage], stage)
        readers = [x for x in sorted({*read}) if self._program.reads_gathered(stage, x)]
        return self._output(Fact.GATHERED, stage, readers, copies=False)

    def gradient(self, stage: int) -> Output:
        """Return where the gradients of a stage's inputs go."""
        sources = self._readers(Fact.INPUT_GRAD, stage)
        return self._output(Fact.INPUT_GRAD, stage, sources, copies=True)

    def _readers(self, fact: Fact, maker: int) -> Sequence[int]:
        program = self._program
        if fact is Fact.INPUT_GRAD:
            return [s for s in program.sources[maker] if program.stages[s].trainable]
        gathered = fact is Fact.GATHERED
        return [
            target
            for target in program.targets[maker]
            if program.reads_gathered(maker, target) is gathered
        ]

    def _places(self, fact: Fact, maker: int, readers: Sequence[int]) -> Places | None:
        if fact is Fact.GATHERED or readers[0] in (maker, _OP_G):
            return None
        if fact is Fact.INPUT_GRAD:
            return self._wiring.returned(maker, readers)
        return self._wiring.sent(maker, readers)

    def _input(self, fact: Fact, maker: int, reader: int) -> Input:
        program, net = self._program, self._program.stages[maker].net
        if program.stages[maker].device == self._device:
            return NearInput(self._near.setdefault((fact, maker, reader), {}), net)
        readers = [
            other
            for other in self._readers(fact, maker)
            if program.stages[other].device == self._device
        ]
        if (fact, maker) not in self._far:
            counts = [self._count(fact, maker, other) for other in readers]
            self._far[fact, maker] = FarInput(
                self._channels, fact, maker, net, counts, self._recorder
            )
        whole = self._far[fact, maker]
        sent = self._places(fact, maker, readers)
        own = self._places(fact, maker, [reader])
        if sent is None or own is None or sent == own:
            return whole
        return PartInput(whole, tuple(sent.index(place) for place in own))

    def _count(self, fact: Fact, maker: int, reader: int) -> int:
        """Return for how many of the maker's microbatches a stage reads the values."""
        if fact is Fact.GATHERED:
            return 1
        own = self._program.num_microbatches_of(maker)
        if fact is Fact.OUTPUT:
            return own
        return min(own, self._program.num_microbatches_of(reader))

    def _output(
        self, fact: Fact, maker: int, readers: Sequence[int], *, copies: bool
    ) -> Output:
        by_device: dict[int, list[int]] = {}
        for reader in readers:
            own = self._device if reader == _OP_G else None
            device = self._program.stages[reader].device if own is None else own
            by_device.setdefault(device, []).append(reader)
        far = [
            _Way(
                (fact, maker, device),
                self._places(fact, maker, stages),
                max(self._count(fact, maker, stage) for stage in stages),
            )
            for device, stages in by_device.items()
            if device != self._device
        ]
        near = [
            _Way(
                self._near.setdefault((fact, maker, reader), {}),
                self._places(fact, maker, [reader]),
                self._count(fact, maker, reader),
            )
            for reader in by_device.get(self._device, ())
        ]
        net = self._program.stages[maker].net
        return Output(self._channels, net, far, near, copies=copies)
