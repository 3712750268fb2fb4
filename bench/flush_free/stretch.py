"""Some steps of one contestant, of which those count that are in the midst of others.

    fill  step 0  step 1 │ step 2   step 3   step 4 │ step 5  drain
                         └──── these count ─────────┘

So a step takes what it takes in a long training: the first ones fill the pipeline, if
the order has no flush, and find in the caches what another contestant left there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from time import perf_counter
from typing import Any, Final

import torch.distributed as dist

from hocket.run.cluster.world import World
from hocket.run.engine.sync.step_result import StepResult

NUM_STEPS: Final = 6
_NUM_BEFORE: Final = 2
_NUM_AFTER: Final = 1


@dataclass(frozen=True, slots=True)
class Stretch:
    """What counts of it, the mean over the steps.

    Args:
        step_s: from the end of a step to the end of the next one.
        bubble: the share of that in which a lane does not work; of all lanes, the mean.
            None where it was not measured.
    """

    step_s: float
    bubble: float | None


def stretch_of(
    steps: Iterable[StepResult | None], num_after: int = _NUM_AFTER
) -> Stretch:
    """Take all steps, on this worker.

    Args:
        steps: to be taken by iterating over them: `NUM_STEPS`, and as many more as more
            than one do not count at the end.
        num_after: the last steps, which do not count.
    """
    ends_s, bubbles = [], []
    for result in steps:
        ends_s.append(perf_counter())
        bubbles.append(None if result is None else result.bubble_fraction)
    last = NUM_STEPS - _NUM_AFTER
    assert len(ends_s) == last + num_after
    counted = [bubble for bubble in bubbles[_NUM_BEFORE:last] if bubble is not None]
    spent_s = ends_s[last - 1] - ends_s[_NUM_BEFORE - 1]
    return Stretch(spent_s / (last - _NUM_BEFORE), fmean(counted) if counted else None)


def in_turn(
    stretches: Mapping[str, Callable[[], Stretch]], world: World, num_rounds: int
) -> dict[str, list[Stretch]]:
    """One stretch of each contestant in each round, and back in every other round.

    A first round is to warm up.

    Args:
        stretches: by name; each takes some steps on this worker.
        world: all workers. A step takes as long as it does on the slowest of them.
        num_rounds: that count.
    """
    own: dict[str, list[Any]] = {name: [] for name in stretches}
    for i in range(1 + num_rounds):
        for name in list(stretches)[:: 1 if i % 2 else -1]:
            dist.barrier()
            found = stretches[name]()
            if i > 0:
                own[name].append(asdict(found))
    parts = world.gather_json(own, "stretches")
    return {
        name: [_together([part[name][i] for part in parts]) for i in range(num_rounds)]
        for name in stretches
    }


def _together(workers: list[dict[str, Any]]) -> Stretch:
    bubbles = [found["bubble"] for found in workers if found["bubble"] is not None]
    return Stretch(
        max(found["step_s"] for found in workers), fmean(bubbles) if bubbles else None
    )
