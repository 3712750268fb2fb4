"""Where a stage's results go: to other devices, and to stages of this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hocket.run.data.step_batch import NetBatches
from hocket.run.engine.lanes.inputs import Key, Values
from hocket.run.engine.lanes.point_to_point import PointToPoint, Route
from hocket.run.engine.lanes.wiring import Places


@dataclass(frozen=True, slots=True)
class Way:
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
        far: Sequence[Way],
        near: Sequence[Way],
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
