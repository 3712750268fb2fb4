"""Where values for a stage come from: another device, or a stage of this one.

A message to a device holds what all of its stages read; each takes its part.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from hocket.core.dataflow import Rule
from hocket.run.data.step_batch import NetBatches
from hocket.run.device.device import Device
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.engine.lanes.channel_ends import Incoming, LaneChannels
from hocket.run.engine.lanes.wiring import Places

Values: TypeAlias = tuple[Tensor, ...]
Key: TypeAlias = tuple[int, int]  # step, microbatch


class Input(ABC):
    """One of the places that values for a stage come from."""

    @abstractmethod
    def take(self, batch: NetBatches, microbatch: int) -> Values:
        """Return a microbatch's values; waits for them where another device sends."""

    @abstractmethod
    def release(self, batch: NetBatches, microbatch: int) -> None:
        """Release the memory of a microbatch's values."""


@dataclass(eq=False)
class NearInput(Input):
    """Values of another stage of this device.

    Args:
        values: where that stage's op puts them.
        net: the net of the stage that makes them.
        lanes: the device, where another of its lanes may make them.
    """

    values: dict[Key, Values]
    net: str
    lanes: Device | None

    def take(self, batch: NetBatches, microbatch: int) -> Values:
        """See `Input.take`; they are there."""
        values = self.values.pop(batch[self.net].step.place_of(microbatch), ())
        if self.lanes is not None:
            self.lanes.keep_alive(values)
        return values

    def release(self, batch: NetBatches, microbatch: int) -> None:
        """See `Input.release`; there is nothing to release."""


@dataclass(eq=False)
class FarInput(Input):
    """Values of a stage of another device.

    One message may serve several stages of this device: the first that takes it waits,
    and the last that releases it frees the buffer.

    Args:
        channel: where they come in.
        net: the net of the stage that makes them.
        counts: for how many microbatches each stage of this device reads them.
        recorder: notes that a wait is over.
    """

    channel: Incoming | LaneChannels
    net: str
    counts: Sequence[int]
    recorder: FlightRecorder

    def __post_init__(self) -> None:
        """Begin without values."""
        self._is_shared = len(self.counts) > 1
        self._locks: dict[Key, threading.Lock] = {}  # of what several readers share
        self._shared: dict[Key, Values] = {}
        self._num_released: dict[Key, int] = {}

    def take(self, batch: NetBatches, microbatch: int) -> Values:
        """See `Input.take`."""
        if not self._is_shared:
            values = self.channel.receive(batch, microbatch)
            self.recorder.resume()
            return values
        key = batch[self.net].step.place_of(microbatch)
        with self._locks.setdefault(key, threading.Lock()):
            if key not in self._shared:
                values = self.channel.receive(batch, microbatch)
                self.recorder.resume()
                self._shared[key] = values
            return tuple(value.clone() for value in self._shared[key])

    def release(self, batch: NetBatches, microbatch: int) -> None:
        """See `Input.release`."""
        if self._is_shared:
            key = batch[self.net].step.place_of(microbatch)
            with self._locks[key]:
                count = self._num_released.pop(key, 0) + 1
                if count < sum(microbatch < other for other in self.counts):
                    self._num_released[key] = count
                    return
                del self._shared[key], self._locks[key]
        self.channel.release(batch, microbatch)


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


@dataclass(eq=False)
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

    source: Input
    rule: Rule
    reader: str
    takes_all: bool
    joins_once: bool

    def __post_init__(self) -> None:
        """Begin without values."""
        self._locks: dict[Key, threading.Lock] = {}  # for forwards in two lanes
        # By the first of a group's readers; of each microbatch of the maker, or joined.
        self._kept: dict[Key, list[Values]] = {}
        self._num_taken: dict[Key, int] = {}

    def take(self, batch: NetBatches, microbatch: int) -> Values:
        """See `Input.take`."""
        work, num_readers = batch[self.reader], self.rule.num_readers
        group = microbatch // num_readers
        key = work.step.place_of(group * num_readers)
        num_read = self.rule.num_read
        numbers = range(group * num_read, (group + 1) * num_read)
        with self._locks.setdefault(key, threading.Lock()):
            if key not in self._kept:
                parts = [self.source.take(batch, number) for number in numbers]
                self._kept[key] = [_joined(parts)] if self.joins_once else parts
            parts = self._kept[key]
            values = parts[0] if self.joins_once else _joined(parts)
            self._num_taken[key] = self._num_taken.get(key, 0) + 1
            if self._num_taken[key] == num_readers:
                del self._kept[key], self._num_taken[key], self._locks[key]
                for number in numbers:
                    self.source.release(batch, number)
        if self.takes_all or num_readers == 1:
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
