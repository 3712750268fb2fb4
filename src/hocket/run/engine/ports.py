"""Where a stage's inputs come from, and where its outputs go.

    from another device ──▶ │       │ ──▶ to another device
                            │ stage │
    from a stage here   ──▶ │       │ ──▶ to a stage here

Which of them it is follows from the program and does not change from step to step, so
it is looked up once. The other way round, gradients take the same ways back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from hocket.core.dataflow import Fact
from hocket.core.program import Program
from hocket.run.comm.step_header import StepHeader
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.engine.point_to_point import PointToPoint, Route

Values: TypeAlias = tuple[Tensor, ...]
Key: TypeAlias = tuple[int, int]  # step, microbatch
# Values between stages of one device, by fact, stage that makes and stage that reads.
Near: TypeAlias = dict[tuple[Fact, int, int], dict[Key, Values]]


class Input(ABC):
    """One of the places that values for a stage come from."""

    @abstractmethod
    def take(self, step: StepHeader, microbatch: int) -> Values:
        """Return a microbatch's values; waits for them where another device sends."""


class NearInput(Input):
    """Values of another stage of this device.

    Args:
        values: where that stage's op puts them.
    """

    def __init__(self, values: dict[Key, Values]) -> None:
        self._values = values

    def take(self, step: StepHeader, microbatch: int) -> Values:
        """See `Input.take`; they are there."""
        return self._values.pop((step.number, microbatch), ())


class FarInput(Input):
    """Values of a stage of another device.

    One message may serve several stages of this device: the first that takes it waits,
    and the last that releases it gives the buffer back.

    Args:
        channels: this device's messages.
        fact: what the values are.
        stage: the stage that makes them.
        num_readers: stages of this device that read them.
        recorder: notes that a wait is over.
    """

    def __init__(
        self,
        channels: PointToPoint,
        fact: Fact,
        stage: int,
        num_readers: int,
        recorder: FlightRecorder,
    ) -> None:
        self._channels = channels
        self._fact = fact
        self._stage = stage
        self._num_readers = num_readers
        self._recorder = recorder
        self._shared: dict[Key, Values] = {}
        self._num_released: dict[Key, int] = {}

    def take(self, step: StepHeader, microbatch: int) -> Values:
        """See `Input.take`."""
        key = step.number, microbatch
        if key in self._shared:
            return self._shared[key]
        values = self._channels.receive(self._fact, self._stage, step, microbatch)
        self._recorder.resume()
        if self._num_readers > 1:
            self._shared[key] = values
        return values

    def release(self, step: StepHeader, microbatch: int) -> None:
        """Give back the memory of a microbatch's values."""
        if self._num_readers > 1:
            key = step.number, microbatch
            count = self._num_released.pop(key, 0) + 1
            if count < self._num_readers:
                self._num_released[key] = count
                return
            self._shared.pop(key, None)
        self._channels.release(self._fact, self._stage, step, microbatch)


class Output:
    """The places that one kind of a stage's results goes to.

    Args:
        channels: this device's messages.
        routes: the channels to other devices.
        near: the places of stages of this device.
        copies: whether values may lie in a buffer that is given back when the op has
            ended, so that a stage here needs copies.
    """

    def __init__(
        self,
        channels: PointToPoint,
        routes: Sequence[Route],
        near: Sequence[dict[Key, Values]],
        *,
        copies: bool,
    ) -> None:
        self._channels = channels
        self._routes = routes
        self._near = near
        self._copies = copies and bool(near)

    def put(self, step: StepHeader, microbatch: int, values: Values) -> None:
        """Hand on what an op made for a microbatch."""
        for route in self._routes:
            self._channels.send(route, step, microbatch, values)
        if self._copies:
            values = tuple(value.clone() for value in values)
        for place in self._near:
            place[step.number, microbatch] = values


class InputMaker:
    """Makes the inputs and outputs of one device's stages.

    Args:
        program: says which stages follow each other, and where they live.
        device: this worker's.
        channels: its messages.
        recorder: notes that waits are over.
    """

    def __init__(
        self,
        program: Program,
        device: int,
        channels: PointToPoint,
        recorder: FlightRecorder,
    ) -> None:
        self._program = program
        self._device = device
        self._channels = channels
        self._recorder = recorder
        self._near: Near = {}
        self._far: dict[tuple[Fact, int], FarInput] = {}

    def outputs_of(self, sources: Sequence[int], stage: int) -> list[Input]:
        """Return where a stage's inputs come from: outputs of the stages before."""
        return [self._input(Fact.OUTPUT, source, stage) for source in sources]

    def gradients_of(self, stage: int) -> list[Input]:
        """Return where the gradients of a stage's outputs come from."""
        targets = self._program.gradient_targets[stage]
        return [self._input(Fact.INPUT_GRAD, target, stage) for target in targets]

    def output(self, stage: int, *, copies: bool) -> Output:
        """Return where a stage's outputs go."""
        targets = self._program.targets[stage]
        return self._output(Fact.OUTPUT, stage, targets, copies=copies)

    def gradient(self, stage: int) -> Output:
        """Return where the gradients of a stage's inputs go."""
        sources = [
            source
            for source in self._program.sources[stage]
            if self._program.stages[source].trainable
        ]
        return self._output(Fact.INPUT_GRAD, stage, sources, copies=True)

    def _input(self, fact: Fact, maker: int, reader: int) -> Input:
        if self._program.stages[maker].device == self._device:
            return NearInput(self._near.setdefault((fact, maker, reader), {}))
        if (fact, maker) not in self._far:
            others = (
                self._program.targets[maker]
                if fact is Fact.OUTPUT
                else self._program.sources[maker]
            )
            num_readers = sum(
                self._program.stages[other].device == self._device for other in others
            )
            self._far[fact, maker] = FarInput(
                self._channels, fact, maker, num_readers, self._recorder
            )
        return self._far[fact, maker]

    def _output(
        self, fact: Fact, maker: int, readers: Sequence[int], *, copies: bool
    ) -> Output:
        devices = [self._program.stages[reader].device for reader in readers]
        routes = [
            (fact, maker, device)
            for device in dict.fromkeys(devices)
            if device != self._device
        ]
        near = [
            self._near.setdefault((fact, maker, reader), {})
            for reader, device in zip(readers, devices, strict=True)
            if device == self._device
        ]
        return Output(self._channels, routes, near, copies=copies)
