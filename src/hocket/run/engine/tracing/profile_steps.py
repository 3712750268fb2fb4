"""Says which steps are traced, and where their traces go."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from hocket.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ProfileSteps:
    """Traces chosen steps by `torch.profiler`, on every worker.

    Each worker writes a trace of torch's operators and kernels, with the ops of its
    lanes as tracks of their own, for https://ui.perfetto.dev:

        traces/steps-3-4-rank-0.json

    Steps in a row are one trace. Where steps overlap, so do their traces: one lasts
    from the first op of its first step to the last op of its last step. A step is
    slower while it is traced.

    Args:
        steps: the steps' numbers, such as `range(3, 5)`.
        folder: where traces go.
        memory: on GPUs, also write what the allocator did in these steps, for
            https://pytorch.org/memory_viz: `steps-3-4-rank-0.memory.pickle`.

    Raises:
        ConfigError: there is no step, or a number is no step's.
    """

    steps: Collection[int]
    folder: str | Path = "traces"
    memory: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers that are no steps'."""
        numbers: list[object] = [*self.steps]
        wrong = [x for x in numbers if not isinstance(x, int) or x < 0]
        if wrong or not numbers:
            what = f"got {wrong[0]!r}" if wrong else "it is empty"
            raise ConfigError(
                "ProfileSteps(steps=...) takes the numbers of steps, from 0, such as "
                f"range(3, 5): {what}"
            )

    def check_device(self, device: torch.device) -> None:
        """Refuse a snapshot of memory where there is no history of it.

        Raises:
            ConfigError: it is asked for, and the device is no GPU.
        """
        if self.memory and device.type != "cuda":
            raise ConfigError(
                "ProfileSteps(memory=True): torch keeps a history of allocations only "
                f"for CUDA, and this worker computes on the {device.type.upper()}: "
                "leave memory out; `pipeline.measured()` has the bytes over time of "
                "a step as they were planned"
            )
