"""All contestants of one model: orders with and without a flush, and their bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import hocket
from bench.flush_free.stretch import NUM_STEPS, Stretch, stretch_of
from bench.flush_free.table import ONE_BLOCK
from bench.measure import paired_ratio, spread
from bench.models import Case
from bench.pipeline_vs_torch.cut import Cut
from bench.pipeline_vs_torch.gradients import (
    TOLERANCE,
    Watch,
    model_of,
    off_by,
    plain_gradients,
    refuse_others,
)
from bench.pipeline_vs_torch.peer import bound_step
from hocket.core.gates import gates_of
from hocket.core.simulate import simulate
from hocket.run.cluster.world import World
from hocket.run.engine.plan import Plan

COMPARED: Final = "pipedream-2bw"
_NUM_DEVICES: Final = 2
_GIVEN_STEPS: Final = 3
_MORE_STEPS: Final = 8  # over which a predicted step is the mean


@dataclass(frozen=True, slots=True)
class Entry:
    """One of the pipelines.

    Args:
        schedule: that it plays.
        pipeline: which plays it.
        cut: that it found balanced.
        off_by: how far its gradients are off, at most.
    """

    schedule: str
    pipeline: hocket.Pipeline
    cut: Cut
    off_by: float

    @property
    def bound(self) -> str:
        """The name of what no order with this cut is faster than."""
        return f"bound {self.cut.boundaries} {self.cut.ranks}"


class Field:
    """Who takes part, on this worker.

    Args:
        case: the model, the batch and the loss.
        world: two workers.
        folder: where the first pipeline's profile is kept for the others.

    Attributes:
        stretches: of every contestant, by its name.
    """

    def __init__(self, case: Case, world: World, folder: str) -> None:
        self.stretches: dict[str, Callable[[], Stretch]] = {}
        self._world = world
        self._case = case
        self._folder = folder
        self._batch = case.batch()
        self._expected = plain_gradients(case)
        self._entries: list[Entry] = []

    def enter(self, schedule: str) -> None:
        """Let a schedule take part, and the bound of its cut.

        Args:
            schedule: its name; see `order_of`.

        Raises:
            RuntimeError: the gradients of its first step are wrong.
        """
        case, world, watch = self._case, self._world, Watch()
        pipeline = hocket.Pipeline(
            model_of(case),
            case.loss,
            optimizer=lambda parameters: watch.sgd(parameters.named()),
            example=self._batch,
            schedule=order_of(schedule, case.num_microbatches),
            num_microbatches=case.num_microbatches,
            profile_dir=self._folder,
            world=world,
        )
        watch.begin()
        pipeline.step(self._batch)
        workers = world.gather_json(off_by(watch.end(), self._expected), schedule)
        off = refuse_others(schedule, workers, self._expected, TOLERANCE)
        entry = Entry(schedule, pipeline, Cut.of(pipeline), off)
        self._entries.append(entry)
        self.stretches[schedule] = lambda: stretch_of(
            pipeline.train([self._batch] * NUM_STEPS)
        )
        if entry.bound not in self.stretches:
            step = bound_step(case, entry.cut, world.rank)
            self.stretches[entry.bound] = lambda: stretch_of(_repeated(step))

    def rows(self, stretches: Mapping[str, Sequence[Stretch]]) -> Iterator[Any]:
        """What was measured, a row for each pipeline."""
        found = {
            name: [stretch.step_s for stretch in own] for name, own in stretches.items()
        }
        for entry in self._entries:
            step_s, bound_s = found[entry.schedule], found[entry.bound]
            plan = entry.pipeline.plan
            bubbles = [
                x.bubble for x in stretches[entry.schedule] if x.bubble is not None
            ]
            row = {
                "case": self._case.name,
                "schedule": entry.schedule,
                "num_microbatches": self._case.num_microbatches,
                "num_rounds": len(step_s),
                "boundaries": list(entry.cut.boundaries),
                "ranks": list(entry.cut.ranks),
                "step": spread(step_s),
                "bound": spread(bound_s),
                "step_over_bound": paired_ratio(step_s, bound_s),
                "predicted_ms": round(predicted_step_s(plan) * 1e3, 4),
                "bubble": {
                    "predicted": round(predicted_bubble(plan), 4),
                    "measured": round(median(bubbles), 4),
                },
                "gradients_off_by": entry.off_by,
            }
            if COMPARED in found:
                row["speedup"] = paired_ratio(found[COMPARED], step_s)
            yield row

    def close(self) -> None:
        """Let all pipelines end, the last one first, as they took over signals."""
        for entry in reversed(self._entries):
            entry.pipeline.close()


def _repeated(step: Callable[[], None]) -> Iterator[None]:
    for _ in range(NUM_STEPS):
        step()
        yield


def order_of(schedule: str, num_microbatches: int) -> str | hocket.Schedule:
    """The named schedule; an order of one block per step for a name that ends so.

    Args:
        schedule: its name, with `ONE_BLOCK` behind it or not.
        num_microbatches: of a step.
    """
    name = schedule.removesuffix(ONE_BLOCK)
    if name == schedule:
        return schedule
    return hocket.make_schedule(
        name,
        num_devices=_NUM_DEVICES,
        num_microbatches=num_microbatches,
        num_steps=_GIVEN_STEPS,
        num_blocks=1,
    )


def predicted_step_s(plan: Plan) -> float:
    """Of one step among others."""
    schedule = plan.schedule
    if not schedule.body:
        return plan.predicted.makespan_s
    longer = schedule.with_num_steps(schedule.program.num_steps + _MORE_STEPS)
    gates = gates_of(schedule, clips=False)
    longer_s = simulate(longer, plan.costs, gates).makespan_s
    return (longer_s - plan.predicted.makespan_s) / _MORE_STEPS


def predicted_bubble(plan: Plan) -> float:
    """Of a step with a flush, all of it, for the next one is like it."""
    if not plan.schedule.body:
        return plan.predicted.bubble_fraction
    return plan.predicted.steady_bubble_fraction
