"""When the ops of one worker's lanes ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hocket.run.device.stopwatch import Seconds


@dataclass(frozen=True, slots=True)
class Record:
    """When the ops of each lane ran, in this process's seconds; 0 if one did not.

    Args:
        start_s: of each lane, the moment at which each op began.
        end_s: of each lane, the moment at which each op ended.
    """

    start_s: tuple[Seconds, ...]
    end_s: tuple[Seconds, ...]

    @classmethod
    def joined(cls, records: Sequence[Record]) -> Record:
        """Put the times of several portions one behind the other."""
        starts = zip(*(record.start_s for record in records), strict=True)
        ends = zip(*(record.end_s for record in records), strict=True)
        return cls(
            tuple(np.concatenate(times) for times in starts),
            tuple(np.concatenate(times) for times in ends),
        )

    @property
    def num_ops(self) -> int:
        """How many ops there are in all lanes."""
        return sum(len(times) for times in self.start_s)
