"""All contestants of one model: hocket's and torch's schedules, and their bounds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import hocket
from bench.measure import paired_ratio, spread
from bench.models import Case
from bench.pipeline_vs_torch.cut import Cut
from bench.pipeline_vs_torch.gradients import (
    TOLERANCE,
    TOLERANCE_COMPILED,
    Watch,
    model_of,
    off_by,
    plain_gradients,
    refuse_others,
)
from bench.pipeline_vs_torch.peer import PEERS, bound_step, torch_step
from hocket.run.cluster.world import World
from hocket.run.stage.compiled.function import CompileWarning

LOOPED: Final = {"interleaved-1f1b", "looped-bfs", "interleaved-zb"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One of hocket's pipelines.

    Args:
        schedule: that it plays.
        compiled: whether its stages are.
        pipeline: which plays it.
        cut: that it found balanced.
    """

    schedule: str
    compiled: bool
    pipeline: hocket.Pipeline
    cut: Cut

    @property
    def label(self) -> str:
        """Among all contestants."""
        return f"hocket {self.schedule}{', compiled' * self.compiled}"


class Field:
    """Who takes part, on this worker.

    Args:
        case: the model, the batch and the loss.
        world: two workers.
        folder: where the first pipeline's profile is kept for the others.

    Attributes:
        steps: of every contestant, by its label.
    """

    def __init__(self, case: Case, world: World, folder: str) -> None:
        self.world = world
        self.steps: dict[str, Callable[[], object]] = {}
        self._case = case
        self._folder = folder
        self._expected = plain_gradients(case)
        self._off: dict[str, float] = {}
        self._entries: list[Entry] = []

    def enter(self, schedule: str) -> None:
        """Let hocket take part with a schedule, torch if it has it, and their bound.

        Raises:
            RuntimeError: the gradients of one of them are wrong.
        """
        watch, cut = Watch(), self._enter(schedule)
        if schedule in PEERS:
            step = torch_step(self._case, cut, schedule, self.world.rank, watch)
            self._admit(f"torch {schedule}", step, watch)
        if _bound(cut) not in self.steps:
            self.steps[_bound(cut)] = bound_step(self._case, cut, self.world.rank)

    def enter_compiled(self, schedule: str) -> None:
        """Let hocket take part with a schedule that it has, its stages compiled.

        Raises:
            RuntimeError: the gradients are wrong.
            CompileWarning: a stage cannot be compiled.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("error", CompileWarning)
            self._enter(schedule, compiled=True)

    def _enter(self, schedule: str, *, compiled: bool = False) -> Cut:
        case, watch = self._case, Watch()
        batch = case.batch()
        pipeline = hocket.Pipeline(
            model_of(case),
            case.loss,
            optimizer=lambda parameters: watch.sgd(parameters.named()),
            example=batch,
            schedule=schedule,
            num_microbatches=case.num_microbatches,
            stages_per_device=2 if schedule in LOOPED else None,
            profile_dir=self._folder,
            compile=compiled,
            world=self.world,
        )
        entry = Entry(schedule, compiled, pipeline, Cut.of(pipeline))
        self._entries.append(entry)
        tolerance = TOLERANCE_COMPILED if compiled else TOLERANCE
        self._admit(entry.label, lambda: pipeline.step(batch), watch, tolerance)
        return entry.cut

    def _admit(
        self,
        label: str,
        step: Callable[[], object],
        watch: Watch,
        tolerance: float = TOLERANCE,
    ) -> None:
        """Take a first step, whose gradients are looked at."""
        watch.begin()
        step()
        off = off_by(watch.end(), self._expected)
        workers = self.world.gather_json(off, label)
        self._off[label] = refuse_others(label, workers, self._expected, tolerance)
        self.steps[label] = step

    def rows(
        self, seconds: Mapping[str, Sequence[float]], num_rounds: int
    ) -> Iterator[dict[str, Any]]:
        """What was measured, a row for each of hocket's pipelines."""
        for entry in self._entries:
            timeline = entry.pipeline.measured()
            names = {"hocket": entry.label, "bound": _bound(entry.cut)}
            if not entry.compiled:
                names["torch"] = f"torch {entry.schedule}"
            found = {k: seconds[name] for k, name in names.items() if name in seconds}
            pairs = [("hocket", "torch"), ("hocket", "bound"), ("torch", "bound")]
            yield {
                "case": self._case.name,
                "schedule": entry.schedule,
                "compiled": entry.compiled,
                "num_rounds": num_rounds,
                "boundaries": list(entry.cut.boundaries),
                "ranks": list(entry.cut.ranks),
                **{name: spread(values) for name, values in found.items()},
                **{
                    f"{a}_over_{b}": paired_ratio(found[a], found[b])
                    for a, b in pairs
                    if a in found and b in found
                },
                "gradients_off_by": {
                    name: self._off[label]
                    for name, label in names.items()
                    if label in self._off
                },
                "bubble": {
                    "predicted": round(entry.pipeline.predicted.bubble_fraction, 4),
                    "measured": round(timeline.bubble_fraction, 4),
                },
            }

    def close(self) -> None:
        """Let all pipelines end, the last one first, as they took over signals."""
        for entry in reversed(self._entries):
            entry.pipeline.close()


def _bound(cut: Cut) -> str:
    return f"bound {cut.boundaries} {cut.ranks}"
