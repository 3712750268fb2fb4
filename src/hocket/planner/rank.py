"""Ranks every way to train a model on a cluster, the best first.

Candidates are taken in the order of a bound that no order of their work can beat. One
whose bound is worse than the best outcomes found so far cannot come in among them, so
it need not be simulated; `Search.is_exhaustive` has all of them simulated.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Final, TypeAlias

from hocket.core.hardware import Catalogue, Hardware, load_catalogue, multiplied_in
from hocket.core.timelines.idle import Cause, idle_by_cause
from hocket.core.timelines.timeline import Timeline
from hocket.errors import PlanError, ShapeError
from hocket.planner.candidate import (
    DDP,
    FSDP,
    HSDP,
    ONE_DEVICE,
    REVERSE_FIRST_K,
    ZERO_1,
    Candidate,
    Outcome,
)
from hocket.planner.cluster import Cluster
from hocket.planner.predict import Predictor
from hocket.planner.ranking.ranking import NUM_ROWS, PLAIN, joined, notes_on
from hocket.planner.ranking.report import Ranking
from hocket.planner.ranking.table import NUM_MISFITS
from hocket.planner.replicas.data_parallel import (
    data_parallel_outcome,
    data_parallel_timeline,
    least_s,
)
from hocket.planner.stages import NO_TRIALS, MeasuredTrials
from hocket.planner.work import ModelCosts
from hocket.schedules import SCHEDULES

WORK: Final = "work"
_BUBBLE: Final = "bubble"
_BUSY: Final = 0.05  # of a step: who is idle for less is limited by the work alone
_REDUCTION: Final = "reduction"
_WORDS: Final = {Cause.FILL: _BUBBLE, Cause.OTHER: _BUBBLE, Cause.REDUCTION: _REDUCTION}

STAGES_PER_DEVICE: Final = (1, 2, 3, 4, 6, 8)
MOST_OPS: Final = 60_000  # of one candidate; longer orders are left out, and counted
_NUM_TRIES: Final = 24  # the time of an order that is searched for, in simulations


Progress: TypeAlias = Callable[[int, int], None]

_SHARED_MEMORY: Final = "shared-memory"
_NETWORK: Final = "100gb"


_DIGITS: Final = 6  # of samples per second that are compared; equal in all six is a tie
_ROUNDED: Final = 1 - 1e-5  # slack: rounding never drops a candidate that could tie


@dataclass(slots=True)
class RankedSoFar:
    """The outcomes that were simulated so far.

    Args:
        num_best: outcomes that must be the best there are.
        outcomes: all of them.
        best_s: the shortest steps of those that fit, ascending.
        best_of: the shortest step that fits, by schedule.
        num_beaten: candidates that cannot be among the best.
        num_too_long: candidates with too many ops.
    """

    num_best: int
    outcomes: list[Outcome] = field(default_factory=list)
    best_s: list[float] = field(default_factory=list)
    best_of: dict[str, float] = field(default_factory=dict)
    num_beaten: int = 0
    num_too_long: int = 0

    def is_beaten(self, bound_s: float, candidate: Candidate) -> bool:
        """Return whether it can be neither among the best, nor its schedule's best."""
        least_s = bound_s * _ROUNDED
        if len(self.best_s) < self.num_best or least_s <= self.best_s[-1]:
            return False
        return least_s > self.best_of.get(candidate.schedule, inf)

    def add(self, outcome: Outcome | None) -> None:
        """Add an outcome; None if the schedule refused these stages or microbatches."""
        if outcome is None:
            return
        self.outcomes.append(outcome)
        if outcome.fits:
            insort(self.best_s, outcome.step_s)
            del self.best_s[self.num_best :]
            name = outcome.candidate.schedule
            known = self.best_of.get(name, outcome.step_s)
            self.best_of[name] = min(known, outcome.step_s)


def order(outcome: Outcome) -> tuple[float | Candidate, ...]:
    """Sort key: fitting ones first by time, then the others by missing memory.

    Of equals the simpler: plain data parallelism with the least sharding, then fewer
    devices per replica, no recomputation, less memory.
    """
    candidate = outcome.candidate
    if not outcome.fits:
        return 1, outcome.missing_bytes, candidate
    return (
        0,
        -float(f"{outcome.samples_per_s:.{_DIGITS}g}"),
        PLAIN.get(candidate.schedule, len(PLAIN)),
        candidate.num_devices,
        candidate.recomputes,
        outcome.peak_bytes,
        candidate,
    )


@dataclass(frozen=True, slots=True)
class Search:
    """Which candidates to consider.

    Args:
        schedules: names of schedules; all that train when not given. Those of data
            parallelism are considered where they are named, or `data_parallel` is true.
        num_devices: devices of one pipeline; everything that divides the devices when
            not given.
        num_shards: devices that hold each of its stages together; everything that
            divides the pipelines when not given.
        num_microbatches: microbatches per replica; everything that divides its samples
            when not given.
        stages_per_device: the numbers of stages per device, for schedules that have
            several.
        recompute: whether stages may keep everything, or only their inputs.
        data_parallel: whether to include plain data parallelism.
        num_best: how many outcomes must be the best that there are.
        is_exhaustive: whether to simulate also what cannot be among them.
        max_delay: the most updates by which the weights of the choice may be stale;
            staler orders are included only if they are named.
        clips: whether updates without a flush need all gradients of their group, and so
            come later.
    """

    schedules: tuple[str, ...] | None = None
    num_devices: tuple[int, ...] | None = None
    num_shards: tuple[int, ...] | None = None
    num_microbatches: tuple[int, ...] | None = None
    stages_per_device: tuple[int, ...] = STAGES_PER_DEVICE
    recompute: tuple[bool, ...] = (False, True)
    data_parallel: bool = True
    num_best: int = NUM_ROWS
    is_exhaustive: bool = False
    max_delay: int = 0
    clips: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """The arguments of `hocket.plan` that say nothing of the model.

    Args:
        num_devices: the number of all devices.
        hardware: the kind of device, such as "a100-80g"; when not given, the model is
            profiled on this machine.
        links: the link between devices of one node, such as "nvlink", "pcie" or
            "pcie4"; when not given, the fastest that the device has, and shared memory
            on a CPU.
        num_nodes: the number of nodes, each with equally many devices.
        network: the link between nodes; "100gb" when not given.
        batch_size: samples per step, over all replicas; the example's when not given.
        precision: "float32", "tf32", "bfloat16" or "float16" (with autocast), or
            "bfloat16-weights" (with float32 masters); float32, or what a recipe says,
            when not given.
        memory_bytes: the memory of each device, if it is not most of the device's own.
        hardware_file: a TOML file with more devices and links, or other numbers.
        search: which candidates to consider; those of `Search()` when not given.
    """

    num_devices: int
    hardware: str | None = None
    links: str | None = None
    num_nodes: int = 1
    network: str | None = None
    batch_size: int | None = None
    precision: str | None = None
    memory_bytes: int | None = None
    hardware_file: str | Path | None = None
    search: Search | None = None

    @property
    def catalogue(self) -> Catalogue:
        """The known devices and links."""
        file = self.hardware_file
        return load_catalogue(None if file is None else Path(file))

    @property
    def device(self) -> Hardware | None:
        """The kind of device; None for this machine's.

        Raises:
            PlanError: it is unknown, or has not the precision.
        """
        if self.hardware is None:
            return None
        found = self.catalogue.device(self.hardware)
        found.reached_flops(multiplied_in(self.precision or "float32"))
        return found

    def cluster(self, usable_bytes: int = 0) -> Cluster:
        """Return the devices and their links.

        Args:
            usable_bytes: the memory of each device, if it is not known otherwise.

        Raises:
            PlanError: a device or link is unknown or missing, or nodes are not equal.
        """
        catalogue, device = self.catalogue, self.device
        name = "this machine's device" if device is None else device.name
        usable_bytes = usable_bytes if device is None else device.usable_bytes
        own = (_SHARED_MEMORY,) if device is None else device.links
        if self.links is None and not own:
            raise PlanError(
                f"{name} names no links: say which, one of {', '.join(catalogue.links)}"
            )
        return Cluster(
            self.num_devices,
            usable_bytes if self.memory_bytes is None else self.memory_bytes,
            catalogue.link(self.links or own[0], device),
            catalogue.link(self.network or _NETWORK) if self.num_nodes > 1 else None,
            self.num_nodes,
            name,
        )


def rank(
    work: ModelCosts,
    cluster: Cluster,
    batch_size: int,
    search: Search | None = None,
    trials: MeasuredTrials = NO_TRIALS,
    progress: Progress | None = None,
) -> Ranking:
    """Predict every way to train, the best first.

    Args:
        work: the model's costs.
        cluster: the devices.
        batch_size: samples per step, over all replicas.
        search: which candidates to consider.
        trials: the measured trials on these devices.
        progress: called with the number of candidates done, and of all.

    Raises:
        PlanError: nothing can be tried: fewer samples than one per replica, or a name
            that is no schedule.
    """
    search = Search() if search is None else search
    predictor = Predictor(work, cluster, batch_size, trials, clips=search.clips)
    _check_names(search)
    found = RankedSoFar(search.num_best)
    most_delay = search.max_delay if search.schedules is None else inf
    bounds = sorted(_bounds(predictor, _candidates(predictor, search), most_delay))
    for number, (bound_s, candidate) in enumerate(bounds):
        if progress is not None:
            progress(number, len(bounds))
        if not search.is_exhaustive and _is_beaten(
            predictor, candidate, bound_s, found
        ):
            found.num_beaten += 1
        else:
            found.add(_try(predictor, candidate, found))
    if not found.outcomes:
        raise PlanError(
            f"nothing can be tried for {batch_size} samples on {cluster.num_devices} "
            f"devices: {_why_nothing(predictor, search, found)}"
        )
    ranking = Ranking(
        work.name,
        work.how,
        cluster,
        batch_size,
        tuple(sorted(found.outcomes, key=order)),
        found.num_beaten,
        found.num_too_long,
        tuple(layer.name for layer in predictor.layers(1)),
        max_delay=search.max_delay,
    )
    return _with_timelines(ranking, predictor, search)


def _with_timelines(ranking: Ranking, predictor: Predictor, search: Search) -> Ranking:
    """Return the ranking with a timeline, costs, and what is said of its rows."""

    def timeline(candidate: Candidate) -> Timeline:
        is_plain = candidate.is_data_parallel
        draw = data_parallel_timeline if is_plain else Predictor.timeline
        return draw(predictor, candidate)

    rows = ranking.rows(search.num_best)
    if search.is_exhaustive:
        rows = joined(ranking.fitting)
    limits = {
        outcome.candidate: limit_of(row[0], timeline) for row in rows for outcome in row
    }
    shown = [outcome for row in rows for outcome in row]
    notes = notes_on(predictor, [*shown, *ranking.closest(NUM_MISFITS)])
    best = ranking.best
    step = None if best is None else timeline(best.candidate)
    played = ranking.pipeline
    costs = None if played is None else predictor.costs(played.candidate)
    said = tuple(filter(None, notes))
    return replace(ranking, timeline=step, costs=costs, notes=said, limits=limits)


def _is_beaten(
    predictor: Predictor, candidate: Candidate, bound_s: float, found: RankedSoFar
) -> bool:
    """Return whether a candidate cannot matter: by a quick bound, or by a tight one."""
    if found.is_beaten(bound_s, candidate):
        return True
    if candidate.is_data_parallel or not found.best_s:
        return False
    return found.is_beaten(predictor.tight_bound_s(candidate), candidate)


def _why_nothing(predictor: Predictor, search: Search, found: RankedSoFar) -> str:
    """Return what the first schedule that refuses its numbers says."""
    refused = () if found.num_too_long else _candidates(predictor, search)
    for candidate in refused:
        try:
            predictor.schedule(candidate)
        except ShapeError as error:
            return str(error)
    return "use a larger batch, or other microbatches"


def _try(
    predictor: Predictor, candidate: Candidate, found: RankedSoFar
) -> Outcome | None:
    if candidate.is_data_parallel:
        return data_parallel_outcome(predictor, candidate)
    num_ops = 2 * candidate.num_stages * candidate.num_microbatches
    num_tries = _NUM_TRIES if "costs" in SCHEDULES[candidate.schedule].options else 1
    if num_ops * num_tries > MOST_OPS:
        found.num_too_long += 1
        return None
    try:
        return predictor.outcome(candidate)
    except ShapeError:
        return None


def _bounds(
    predictor: Predictor, candidates: Iterable[Candidate], most_delay: float
) -> Iterator[tuple[float, Candidate]]:
    """Return the candidates with their bounds; torch's data parallelism comes first."""
    for candidate in candidates:
        if candidate.is_data_parallel:
            many = candidate.schedule in (HSDP, REVERSE_FIRST_K)
            yield least_s(predictor, candidate) if many else 0.0, candidate
            continue
        try:
            if predictor.placement(candidate).delay <= most_delay:
                yield predictor.bound_s(candidate), candidate
        except ShapeError:
            continue


def _candidates(predictor: Predictor, search: Search) -> Iterator[Candidate]:
    num_devices = predictor.cluster.num_devices
    for name, replicas, shards in _plain(num_devices):
        if search.data_parallel or name in (search.schedules or ()):
            for m in _microbatches(predictor, replicas * shards, search):
                for recomputes in search.recompute:
                    yield Candidate(name, 1, replicas, 1, m, recomputes, shards)
    for p in search.num_devices or _divisors(num_devices):
        if p > 1 or not search.data_parallel:
            yield from _pipelines(predictor, search, p)


def _plain(num_devices: int) -> Iterator[tuple[str, int, int]]:
    """Yield plain data parallelism with its replicas and shards; and one device."""
    yield ONE_DEVICE, 1, 1
    if num_devices > 1:
        yield from ((name, num_devices, 1) for name in (DDP, ZERO_1, REVERSE_FIRST_K))
        yield FSDP, 1, num_devices
        for num_shards in _divisors(num_devices)[1:-1]:
            yield HSDP, num_devices // num_shards, num_shards


def _pipelines(predictor: Predictor, search: Search, p: int) -> Iterator[Candidate]:
    num_pipelines = predictor.cluster.num_devices // p
    microbatches = _microbatches(predictor, num_pipelines, search)
    num_shards = search.num_shards or _divisors(num_pipelines)
    for name in search.schedules or sorted(SCHEDULES):
        if SCHEDULES[name].is_data_parallel:
            continue
        for v in _stages_per_device(predictor, search, name, p):
            for m in microbatches:
                for recomputes, s in product(search.recompute, num_shards):
                    yield Candidate(name, p, num_pipelines // s, v, m, recomputes, s)


def _stages_per_device(
    predictor: Predictor, search: Search, name: str, p: int
) -> tuple[int, ...]:
    """Return the numbers of stages per device to consider."""
    num_layers = len(predictor.layers(1))
    least = 1 if SCHEDULES[name].stages_per_device == 1 else 2
    return tuple(v for v in search.stages_per_device if least <= v <= num_layers // p)


def _microbatches(
    predictor: Predictor, num_pipelines: int, search: Search
) -> tuple[int, ...]:
    """Return the numbers of microbatches per pipeline to consider."""
    most = predictor.batch_size // num_pipelines
    if search.num_microbatches is not None:
        return tuple(m for m in search.num_microbatches if m <= most)
    only = predictor.work.only_samples
    if predictor.batch_size % num_pipelines:
        choices = tuple(2**i for i in range(most.bit_length()) if 2**i <= most)
    else:
        choices = _divisors(most) if most else ()
    if only is None:
        return choices
    return tuple(m for m in choices if most == m * only)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(i for i in range(1, number + 1) if number % i == 0)


def _check_names(search: Search) -> None:
    unknown = [name for name in search.schedules or () if name not in SCHEDULES]
    if unknown:
        raise PlanError(
            f"no schedule is named {unknown[0]!r}; there are "
            f"{', '.join(sorted(SCHEDULES))}"
        )


# | word | a step is long because of |
# |---|---|
# | work | nothing else: devices are idle for less than 5 % of it |
# | bubble | warm-up and drain, or the order while the pipeline is full |
# | messages, reduction, imbalance, host | what devices wait for most |
# | memory | the memory: without recomputation, the same does not fit |
def limit_of(outcome: Outcome, timeline: Callable[[Candidate], Timeline]) -> str:
    """Return what limits an outcome, besides memory.

    Args:
        outcome: one that fits.
        timeline: simulates a candidate.
    """
    if outcome.bubble_fraction < _BUSY:
        return WORK
    if outcome.candidate.is_data_parallel:  # its devices wait for nothing else
        return _REDUCTION
    seconds = dict(idle_by_cause(timeline(outcome.candidate)).seconds)
    if outcome.delay:  # its timeline begins with a pipeline that is empty
        del seconds[Cause.FILL]
    words: dict[str, float] = {}
    for cause, idle_s in seconds.items():
        word = _WORDS.get(cause, cause.value)
        words[word] = words.get(word, 0.0) + idle_s
    return max(words, key=words.__getitem__)
