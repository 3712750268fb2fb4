"""The memory of a correction for stale gradients, in copies of weights.

                      kept from update to update   while one runs   read by forwards
    error-feedback    a copy for each of `delay`   1 more
    weight-prediction none, or 1                   none, or 1 more  a version of its own

The weight versions that stages with a delay need anyway are not included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from hocket.core.costs import StageCost
from hocket.core.dataflow import version_read
from hocket.core.op import BACKWARDS, Kind
from hocket.core.schedule import Schedule


@dataclass(frozen=True, slots=True)
class CorrectionCost:
    """The memory of one correction; a stage without a delay needs none.

    Args:
        name: the correction's name.
        kept_per_delay: copies of the trained weights for each update of the delay.
        kept: copies beside those.
        at_work: further copies while an update runs.
        predicts_weights: whether forwards read predicted weights, a version more.
    """

    name: str = "none"
    kept_per_delay: int = 0
    kept: int = 0
    at_work: int = 0
    predicts_weights: bool = False

    def kept_bytes(self, stage: StageCost, delay: int) -> int:
        """Return what a stage keeps from update to update.

        Args:
            stage: the stage's cost, for the bytes of its trained weights.
            delay: the stage's delay, in updates.
        """
        num_copies = self.kept_per_delay * delay + self.kept if delay else 0
        return num_copies * stage.gradient_bytes

    def added_to(self, stage: StageCost, delay: int) -> StageCost:
        """Return a stage's cost with the correction.

        Args:
            stage: the stage's cost without it.
            delay: the stage's delay, in updates.
        """
        if not delay:
            return stage
        trained_bytes = stage.gradient_bytes
        return replace(
            stage,
            optimizer_bytes=stage.optimizer_bytes + self.kept_bytes(stage, delay),
            update_work_bytes=stage.update_work_bytes + self.at_work * trained_bytes,
            guess_bytes=trained_bytes if self.predicts_weights else 0,
        )


NO_CORRECTION: Final = CorrectionCost()


def predicted_versions_alive(schedule: Schedule) -> tuple[int, ...]:
    """Return each stage's most predicted versions alive at once.

    A predicted version lives from the first op that reads it, or the update of its
    weights, to the last op that reads it. The version being updated is not counted.
    """
    program = schedule.program
    found = []
    for number, stage in enumerate(program.stages):
        ops = [
            op
            for lane in schedule.lanes
            if lane.device == stage.device
            for op in lane.ops
            if op.stage == number
        ]
        lives: dict[int, tuple[int, int]] = {}
        for i, op in enumerate(ops):
            if op.kind in _READERS:
                version = version_read(number, op.step, program)
                lives[version] = lives.get(version, (i, i))[0], i
            elif op.kind is Kind.UPDATE:
                lives.setdefault(op.step, (i, i))
        spans = lives.values()
        found.append(
            max(sum(begin <= i <= end for begin, end in spans) for i, _ in spans)
        )
    return tuple(found)


_READERS: Final = BACKWARDS | {Kind.FORWARD}
