"""Keep messages and reductions as columns: what was sent, and when."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from hocket.core.op import Op
from hocket.core.timelines.arrays import Floats, Ints


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message between devices, or one reduction (from a device to itself)."""

    op: Op  # the op that made what is sent, or the reduction
    from_device: int
    to_device: int
    start_s: float
    end_s: float
    num_bytes: int


def _ints() -> Ints:
    return np.zeros(0, np.int64)


def _floats() -> Floats:
    return np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Every transfer of a timeline, one row each, in order of start.

    Args:
        lane: the lane of the op that made what is sent, or of the reduction.
        position: the place of that op in its lane.
        from_device: where it comes from.
        to_device: where it goes; a reduction stays on its device.
        start_s: when it begins to occupy the link.
        end_s: when it is usable at the other end.
        num_bytes: its size; of a reduction, the size of what is reduced.
    """

    lane: Ints = field(default_factory=_ints)
    position: Ints = field(default_factory=_ints)
    from_device: Ints = field(default_factory=_ints)
    to_device: Ints = field(default_factory=_ints)
    start_s: Floats = field(default_factory=_floats)
    end_s: Floats = field(default_factory=_floats)
    num_bytes: Ints = field(default_factory=_ints)

    def taken(self, rows: Ints) -> Traffic:
        """Return a selection of the transfers, in the order given."""
        return Traffic(*(getattr(self, column.name)[rows] for column in fields(self)))
