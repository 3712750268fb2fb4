"""Where a stage's results go: to other devices, and to stages of this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hocket.run.data.step_batch import NetBatches
from hocket.run.engine.lanes.channel_ends import Outgoing
from hocket.run.engine.lanes.inputs import Key, Values
from hocket.run.engine.lanes.wiring import Places


@dataclass(frozen=True, slots=True)
class FarWay:
    """A way of results to another device.

    Args:
        channels: the channel of each lane of this device.
        places: which of the results; None for all.
        count: for how many microbatches they are read.
    """

    channels: Mapping[int, Outgoing]
    places: Places | None
    count: int


@dataclass(frozen=True, slots=True)
class NearWay:
    """A way of results to a stage of this device.

    Args:
        values: where that stage looks.
        places: which of the results; None for all.
        count: for how many microbatches they are read.
    """

    values: dict[Key, Values]
    places: Places | None
    count: int


class Output:
    """The places that one kind of a stage's results goes to.

    Args:
        net: the stage's net.
        far: to other devices.
        near: to stages of this device.
        copies: whether values may lie in a buffer that is released when the op has
            ended, so that a stage here needs copies.
    """

    def __init__(
        self, net: str, far: Sequence[FarWay], near: Sequence[NearWay], *, copies: bool
    ) -> None:
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
                some = values if way.places is None else _picked(values, way.places)
                way.channels[lane].send(batch, microbatch, some)
        if not self._near:
            return
        copies, key = self._copies, batch[self._net].step.place_of(microbatch)
        for near in self._near:
            if microbatch < near.count:
                some = values if near.places is None else _picked(values, near.places)
                near.values[key] = tuple(x.clone() for x in some) if copies else some
                copies = True  # a stage may change what it reads in place


def _picked(values: Values, places: Places) -> Values:
    return tuple([values[place] for place in places])
