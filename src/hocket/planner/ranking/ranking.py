"""The result of a plan: outcomes, the best first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Final, TypeAlias

from hocket.core.costs import Costs
from hocket.core.timelines.timeline import Timeline
from hocket.draw.quantity import percent, short
from hocket.planner.candidate import DATA_PARALLEL, Candidate, Outcome
from hocket.planner.cluster import Cluster
from hocket.planner.predict import Predictor
from hocket.schedules.v_min import repeating_bubble

FORMAT: Final = 1
NUM_ROWS: Final = 12
_NUMBERS: Final = (  # of an outcome, as JSON has them
    *("step_s", "samples_per_s", "bubble_fraction", "bound_s", "gap", "fits"),
    *("missing_bytes", "peak_bytes", "message_bytes", "reduce_bytes", "delay"),
)
_AS_FAST: Final = 0.01
PLAIN: Final = {name: place for place, name in enumerate(DATA_PARALLEL)}


@dataclass(frozen=True, eq=False, repr=False)
class RankedOutcomes:
    """All simulated outcomes of a plan, the best first.

    Args:
        model: the model's name.
        how: how the seconds were found, a sentence.
        cluster: the devices.
        batch_size: samples per step, over all replicas.
        outcomes: those that fit, the fastest first; then those that do not, the one
            that misses least first.
        num_beaten: candidates not simulated, because no order of their work could be
            among the best.
        num_too_long: candidates not simulated, because of too many ops.
        layer_names: the names of the model's layers, for the boundaries.
        timeline: the timeline of the best's step.
        costs: the costs of `pipeline`'s stages and links; None without one.
        notes: assumptions, a sentence each.
        max_delay: the most updates by which the weights of the choice may be stale.
        limits: what limits the candidates of the table's rows, in a word.
    """

    model: str
    how: str
    cluster: Cluster
    batch_size: int
    outcomes: tuple[Outcome, ...]
    num_beaten: int = 0
    num_too_long: int = 0
    layer_names: tuple[str, ...] = ()
    timeline: Timeline | None = None
    costs: Costs | None = None
    notes: tuple[str, ...] = field(default=())
    max_delay: int = 0
    limits: Mapping[Candidate, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return one line; `str` is the whole table."""
        best = "nothing fits"
        if self.best is not None:
            chosen = self.best.candidate
            speed = f"{self.best.samples_per_s:.4g} /s"
            best = f"best {chosen.schedule} {chosen.layout}, {speed}"
        return (
            f"<hocket.Ranking of {self.model} on {self.cluster.num_devices} devices: "
            f"{best}, of {self.num_candidates} candidates>"
        )

    @cached_property
    def fitting(self) -> tuple[Outcome, ...]:
        """Those that fit, the fastest first."""
        return tuple(outcome for outcome in self.outcomes if outcome.fits)

    @cached_property
    def too_large(self) -> tuple[Outcome, ...]:
        """Those that do not fit, the one that misses least first."""
        return tuple(outcome for outcome in self.outcomes if not outcome.fits)

    @cached_property
    def fastest(self) -> Outcome | None:
        """The fastest that fits, with weights no staler than allowed."""
        return next(self._allowed, None)

    @cached_property
    def best(self) -> Outcome | None:
        """The choice: the simplest of those within 1 % of the fastest.

        No prediction is finer than that. Simpler is what shards less, has fewer stages,
        does not recompute, and holds less.
        """
        if self.fastest is None:
            return None
        least = (1 - _AS_FAST) * self.fastest.samples_per_s
        near = (x for x in self._allowed if x.samples_per_s >= least)
        return min(near, key=_complexity)

    @cached_property
    def best_pipeline(self) -> Outcome | None:
        """The fastest pipeline that fits."""
        return self._first(is_data_parallel=False)

    @property
    def pipeline(self) -> Outcome | None:
        """The choice, or the fastest pipeline that fits if the choice is none."""
        best = self.best
        is_none = best is None or best.candidate.is_data_parallel
        return self.best_pipeline if is_none else best

    @cached_property
    def best_data_parallel(self) -> Outcome | None:
        """The fastest plain data parallelism that fits."""
        return self._first(is_data_parallel=True)

    @property
    def num_candidates(self) -> int:
        """The number of all candidates considered."""
        return len(self.outcomes) + self.num_beaten + self.num_too_long

    def rows(self, num_rows: int = NUM_ROWS) -> list[Row]:
        """Return the rows of the table: at most so many, the choice among them.

        See `rows.chosen`.
        """
        wanted = self.best, self.fastest, self.best_pipeline, self.best_data_parallel
        return chosen(self.fitting, num_rows, wanted)

    def limit_of(self, outcome: Outcome) -> str:
        """Return what limits an outcome: `memory`, `work`, or why devices are idle."""
        candidate = outcome.candidate
        # A candidate that recomputes: the same without, which needs more memory.
        twin = replace(candidate, recomputes=False) if candidate.recomputes else None
        if not outcome.fits or twin in self._too_large_candidates:
            return "memory"
        return self.limits.get(candidate, "")

    @cached_property
    def _too_large_candidates(self) -> frozenset[Candidate]:
        return frozenset(outcome.candidate for outcome in self.too_large)

    def closest(self, num_rows: int) -> Iterator[Outcome]:
        """Return, of what does not fit, the one per shape that misses least.

        Args:
            num_rows: the most rows.
        """
        seen: set[tuple[str, int]] = set()
        for outcome in self.too_large:
            shape = outcome.candidate.schedule, outcome.candidate.num_devices
            if shape not in seen and len(seen) < num_rows:
                seen.add(shape)
                yield outcome

    def to_json(self) -> dict[str, Any]:
        """Return everything but the timeline, as plain values with stable keys."""
        best = self.best
        return {
            "format": FORMAT,
            "model": self.model,
            "how": self.how,
            "cluster": _cluster_json(self.cluster),
            "batch_size": self.batch_size,
            "num_candidates": self.num_candidates,
            "num_simulated": len(self.outcomes),
            "num_beaten": self.num_beaten,
            "num_too_long": self.num_too_long,
            "notes": list(self.notes),
            "best": None if best is None else self._outcome_json(best),
            "outcomes": [self._outcome_json(outcome) for outcome in self.outcomes],
        }

    def stage_names(self, outcome: Outcome) -> tuple[str, ...]:
        """Return the first layer of each stage."""
        return tuple(self.layer_names[i] for i in (0, *outcome.boundaries))

    @property
    def _allowed(self) -> Iterator[Outcome]:
        """Those that fit, with weights no staler than allowed."""
        return (x for x in self.fitting if x.delay <= self.max_delay)

    def _first(self, *, is_data_parallel: bool) -> Outcome | None:
        found = (
            outcome
            for outcome in self._allowed
            if outcome.candidate.is_data_parallel == is_data_parallel
        )
        return next(found, None)

    def _outcome_json(self, outcome: Outcome) -> dict[str, Any]:
        buckets = outcome.buckets
        return {
            **asdict(outcome.candidate),
            "samples_per_microbatch": outcome.candidate.samples_of_microbatch(
                self.batch_size
            ),
            "is_data_parallel": outcome.candidate.is_data_parallel,
            **{name: getattr(outcome, name) for name in _NUMBERS},
            "limit": self.limit_of(outcome) or None,
            "memory": [
                {**asdict(split), "total_bytes": split.total_bytes}
                for split in outcome.memory
            ],
            "num_versions": list(outcome.num_versions),
            "stages": list(self.stage_names(outcome)),
            "buckets": buckets
            and {"k": buckets.k, "gradient_bytes": list(buckets.gradient_bytes)},
        }


def _complexity(outcome: Outcome) -> tuple[float, ...]:
    candidate = outcome.candidate
    return (
        PLAIN.get(candidate.schedule, len(PLAIN)),
        candidate.num_stages,
        candidate.recomputes,
        outcome.peak_bytes,
        outcome.step_s,
    )


def _cluster_json(cluster: Cluster) -> dict[str, Any]:
    return {
        "name": cluster.name,
        "num_devices": cluster.num_devices,
        "num_nodes": cluster.num_nodes,
        "memory_bytes": cluster.memory_bytes,
        "link": cluster.link.key,
        "network": None if cluster.network is None else cluster.network.key,
    }


# Choose the rows of a plan's table: the best, its rivals, and equals as one row.

Row: TypeAlias = tuple[Outcome, ...]  # equal but for the name of the schedule

_NEIGHBOURS: Final = 1  # further rows of a schedule that has a row already


def joined(outcomes: Iterable[Outcome]) -> list[Row]:
    """Return rows: outcomes that read the same but for their schedules are one."""
    rows: dict[tuple[object, ...], list[Outcome]] = {}
    for outcome in outcomes:
        rows.setdefault(_numbers(outcome), []).append(outcome)
    return [tuple(row) for row in rows.values()]


def chosen(
    outcomes: Iterable[Outcome], num_rows: int, wanted: Iterable[Outcome | None]
) -> list[Row]:
    """Return at most so many rows, the fastest first.

    They are the best of each schedule, and its next best with another layout, if that
    is faster than the best of others; and always those that are wanted.

    Args:
        outcomes: what fits, the fastest first.
        num_rows: the most rows.
        wanted: outcomes that must have a row, such as the choice.
    """
    rows = joined(outcomes)
    asked = [outcome for outcome in wanted if outcome is not None]
    is_asked = [any(outcome in row for outcome in asked) for row in rows]
    taken = _first_of_each(rows, num_rows - sum(is_asked), is_asked)
    return [row for row, is_taken in zip(rows, taken, strict=True) if is_taken]


def _first_of_each(rows: list[Row], num_rows: int, is_asked: list[bool]) -> list[bool]:
    """Return which rows are taken: all that are asked for, and `num_rows` others."""
    seen: dict[str, int] = {}
    shapes: set[tuple[object, ...]] = set()
    taken = []
    for row, is_due in zip(rows, is_asked, strict=True):
        names = [outcome.candidate.schedule for outcome in row]
        shape = _shape(row[0])
        is_new = any(seen.get(name, 0) <= _NEIGHBOURS for name in names) and any(
            (name, shape) not in shapes for name in names
        )
        is_taken = is_due or (is_new and num_rows > 0)
        num_rows -= is_taken and not is_due
        if is_taken:
            for name in names:
                seen[name] = seen.get(name, 0) + 1
                shapes.add((name, shape))
        taken.append(is_taken)
    return taken


def _shape(outcome: Outcome) -> tuple[object, ...]:
    candidate = outcome.candidate
    return candidate.layout, candidate.stages_per_device


def _numbers(outcome: Outcome) -> tuple[object, ...]:
    """Return what a row shows of an outcome, besides the schedule's name."""
    candidate = outcome.candidate
    return (
        candidate.layout,
        candidate.stages_per_device,
        candidate.num_microbatches,
        candidate.recomputes,
        candidate.is_data_parallel and candidate.schedule,
        short(outcome.samples_per_s),
        percent(outcome.bubble_fraction),
        short(outcome.peak_bytes),
        outcome.delay,
    )


def notes_on(predictor: Predictor, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the assumptions about the orders of a table, a sentence each, or none.

    Args:
        predictor: predicts for the model, on its devices.
        outcomes: the outcomes of its rows.
    """
    pipelines = [x.candidate for x in outcomes if not x.candidate.is_data_parallel]
    splits = sorted({x.schedule for x in pipelines if predictor.placement(x).splits})
    if splits and any(layer.split is None for layer in predictor.layers(1)):
        yield (
            f"Assumed of {', '.join(splits)}, which split a backward (B) into the "
            "gradient of the input (I) and that of the weights (W): activations are "
            "held until W is done, and W takes what is left of B without I."
        )
    if any(outcome.delay for outcome in outcomes):
        yield (
            "Orders with * do not drain the pipeline after a step: microbatches read "
            "weights that are `delay` updates old, and stages keep several versions "
            "(2 x 4: four stages keep two each). Their steps are those of a full "
            "pipeline. None is chosen unless its delay is allowed (--max-delay); "
            "hocket.emulate trains in one process exactly as they do."
        )
    yield from _repeating(predictor, outcomes)


def _repeating(predictor: Predictor, outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield that V-Min's best repeats its bubble, if times are not equal."""
    theirs = [x for x in outcomes if x.candidate.schedule == "v-min" and x.fits]
    if not theirs:
        return
    candidate = min(theirs, key=lambda outcome: outcome.step_s).candidate
    program = predictor.placement(candidate).schedule.program
    share = predictor.costs(candidate).mean_share(program)
    yield repeating_bubble(candidate.num_devices, share)
