"""What the workers play until their layout changes."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.run.cluster.layout import Layout
from hocket.run.engine.executor import Executor
from hocket.run.engine.plan import Plan


@dataclass(frozen=True, slots=True)
class PlayedLayout:
    """What the workers play in one layout.

    Args:
        plan: what was decided.
        executor: this worker's.
        layout: the ranks by device and replica.
    """

    plan: Plan
    executor: Executor
    layout: Layout

    @property
    def shape(self) -> str:
        """Stages x replicas, such as "4x2"."""
        return f"{self.layout.num_devices}x{self.layout.num_replicas}"
