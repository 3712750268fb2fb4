"""Layouts as one word: `4x2` is four devices per pipeline, and two such pipelines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from hocket.errors import PlanError

_WORD: Final = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})")


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    """How workers are shared out; as published experiments write it.

    Args:
        num_devices: of one pipeline.
        num_replicas: copies of the pipeline.
    """

    num_devices: int
    num_replicas: int

    @classmethod
    def parse(cls, text: str) -> WorkerLayout:
        """Read `4x2`.

        Raises:
            PlanError: it is none.
        """
        match = _WORD.fullmatch(text)
        if match is None:
            raise PlanError(
                f"{text!r} is no layout: write devices per pipeline x replicas, such "
                "as 8x1, 4x2 or 2x4"
            )
        return cls(int(match[1]), int(match[2]))

    @property
    def num_workers(self) -> int:
        """One per device."""
        return self.num_devices * self.num_replicas

    def __str__(self) -> str:
        """As it is read."""
        return f"{self.num_devices}x{self.num_replicas}"
