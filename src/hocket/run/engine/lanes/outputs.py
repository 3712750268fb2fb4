"""Where a stage's results go: to other devices, and to stages of this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from hocket.run.data.step_batch import NetBatches
from hocket.run.engine.lanes.channel_ends import Outgoing
from hocket.run.engine.lanes.inputs import Key, Values
from hocket.run.engine.lanes.wiring import Places

_To = TypeVar("_To")


class Way(NamedTuple, Generic[_To]):
    """One of the ways that results go.

    Args:
        to: each lane's channel to another device, or where a stage of this one looks.
        places: which of the results; None for all.
        num_read: for how many microbatches they are read.
    """

    to: _To
    places: Places | None
    num_read: int


@dataclass(eq=False)
class Output:
    """The places that one kind of a stage's results goes to.

    Args:
        net: the stage's net.
        far: to other devices.
        near: to stages of this device.
        copies: whether values may lie in a buffer that is released when the op has
            ended, so that a stage here needs copies.
    """

    net: str
    far: Sequence[Way[dict[int, Outgoing]]]
    near: Sequence[Way[dict[Key, Values]]]
    copies: bool

    @property
    def is_used(self) -> bool:
        """Whether the results go anywhere."""
        return bool(self.far or self.near)

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
        for channels, places, num_read in self.far:
            if microbatch < num_read:
                some = values if places is None else _picked(values, places)
                channels[lane].send(batch, microbatch, some)
        if not self.near:
            return
        copies, key = self.copies, batch[self.net].step.place_of(microbatch)
        for found, places, num_read in self.near:
            if microbatch < num_read:
                some = values if places is None else _picked(values, places)
                found[key] = tuple([x.clone() for x in some]) if copies else some
                copies = True  # a stage may change what it reads in place


def _picked(values: Values, places: Places) -> Values:
    return tuple([values[place] for place in places])
