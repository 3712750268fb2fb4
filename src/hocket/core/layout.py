"""Write layouts as one word: `4x2` is four devices per pipeline, and two replicas.

`4x2x2` has two shards for each device of a replica: 16 workers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from hocket.errors import PlanError

_WORD: Final = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})(?:x([1-9]\d{0,5}))?")


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    """The number of workers, in the way that published experiments write it.

    Args:
        num_devices: the devices of one pipeline.
        num_replicas: copies of the weights.
        num_shards: the workers that hold one copy of a stage together.
    """

    num_devices: int
    num_replicas: int
    num_shards: int = 1

    @classmethod
    def parse(cls, text: str) -> WorkerLayout:
        """Read `4x2` or `4x2x2`.

        Raises:
            PlanError: the text is no layout.
        """
        match = _WORD.fullmatch(text)
        if match is None:
            raise PlanError(
                f"{text!r} is no layout: write devices per pipeline x replicas, such "
                "as 8x1, 4x2 or 2x4, and x shards where there are any, such as 4x2x2"
            )
        return cls(int(match[1]), int(match[2]), int(match[3] or 1))

    @property
    def num_workers(self) -> int:
        """The number of workers: one per device."""
        return self.num_devices * self.num_replicas * self.num_shards

    def __str__(self) -> str:
        """Write what `parse` reads."""
        shards = f"x{self.num_shards}" if self.num_shards > 1 else ""
        return f"{self.num_devices}x{self.num_replicas}{shards}"
