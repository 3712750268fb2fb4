"""Chooses the buckets and the k of reverse first-k, by simulation.

    sizes of buckets   1/4  1/2  1 ... 32 MB     each of a small list
    k                  0 ├──────┤ limit          golden section, for each size
                                    └ memory, and weights that buckets share

The step's time falls with k as reductions move away from the next forward, and rises
again as they come too late to be hidden at all: it has one valley, nearly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Final

from hocket.core.costs import Costs, StageCost
from hocket.core.op import Kind
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.timeline import Timeline
from hocket.draw.quantity import byte_size
from hocket.errors import FitError
from hocket.planner.stages import BUCKET_BYTES, group_layers
from hocket.planner.work import LayerCost
from hocket.schedules.entry import Shape
from hocket.schedules.reverse_first_k import reverse_first_k

SIZES: Final = tuple(2.0**i * 10**6 for i in range(-2, 6))
PLANNED_SIZES: Final = (1e6, 4e6, BUCKET_BYTES)  # where there are many candidates
MOST_BUCKETS: Final = 64
_NUM_STEPS: Final = 5  # that are simulated
_FULL_STEP: Final = 2  # from here on, steps take equally long
_GOLDEN: Final = (5**0.5 - 1) / 2
_AS_FAST: Final = 1e-6  # of a step: smaller differences are ignored
_NUM_PARTS: Final = 8  # of the range of k, at whose ends it is simulated first
_FEW: Final = 3  # so narrow a range is tried number by number


@dataclass(frozen=True, slots=True, eq=False)
class BucketSearch:
    """What is to be trained, and on what.

    Args:
        layers: the model's layers.
        stages: returns the costs of buckets that begin at layer 0 and at these.
        costs: all else: the link of reductions, and the host's overhead per op.
        num_replicas: the replicas, of one device each.
        num_microbatches: microbatches of each replica.
        memory_bytes: the memory of each device.
        sizes: the bytes of gradients that a bucket has at least.
        given: the layers at which buckets 1, 2, ... begin, where they are not chosen.
    """

    layers: Sequence[LayerCost]
    stages: Callable[[tuple[int, ...]], tuple[StageCost, ...]]
    costs: Costs
    num_replicas: int
    num_microbatches: int = 1
    memory_bytes: float = inf
    sizes: Sequence[float] = SIZES
    given: tuple[int, ...] | None = None

    def cuts(self) -> Iterator[tuple[int, ...]]:
        """Yield the layers at which buckets 1, 2, ... begin, for each size once."""
        if self.given is not None:
            yield self.given
            return
        cuts = dict.fromkeys(group_layers(self.layers, size) for size in self.sizes)
        few = [cut for cut in cuts if len(cut) < MOST_BUCKETS]
        yield from few or [min(cuts, key=len)]

    def in_place(self, boundaries: tuple[int, ...], costs: Costs) -> BucketSearch:
        """Return the search of k alone, for buckets that were measured as they run."""
        return replace(
            self, stages=lambda _: costs.stages, costs=costs, given=boundaries
        )

    def most_k(self, boundaries: tuple[int, ...]) -> int:
        """Return the largest k with which buckets that share weights are updated once.

        A bucket updates the shared weight, and must have all of its gradients by then:
        only the first of the buckets that share one may be among the first k.
        """
        edges = (0, *boundaries, len(self.layers))
        first: dict[str, int] = {}
        most = len(edges) - 1
        for bucket, (begin, end) in enumerate(pairwise(edges)):
            names = {x.name for layer in self.layers[begin:end] for x in layer.weights}
            if any(first.setdefault(name, bucket) < bucket for name in names):
                most = min(most, bucket)
        return most

    def schedule(
        self, boundaries: tuple[int, ...], k: int, *, barrier: bool = False
    ) -> Schedule:
        """Return the order of a few steps."""
        shape = Shape(
            1,
            self.num_microbatches,
            len(boundaries) + 1,
            num_steps=_NUM_STEPS,
            num_replicas=self.num_replicas,
        )
        return reverse_first_k(shape, k=k, barrier=barrier)

    def tried(
        self, boundaries: tuple[int, ...], k: int, *, barrier: bool = False
    ) -> BucketChoice:
        """Simulate one choice.

        Args:
            boundaries: the layers at which buckets 1, 2, ... begin.
            k: how many buckets' weight gradients come last.
            barrier: whether each step ends before the next begins.
        """
        costs = replace(self.costs, stages=self.stages(boundaries))
        order = self.schedule(boundaries, k, barrier=barrier)
        timeline = simulate(order, costs)
        return BucketChoice(
            boundaries,
            k,
            steady_step_s(timeline),
            round(timeline.peak_bytes(0)),
            timeline,
        )


@dataclass(frozen=True, slots=True, eq=False)
class BucketChoice:
    """Buckets and k, and what they lead to.

    Args:
        boundaries: the layers at which buckets 1, 2, ... begin.
        k: how many buckets' weight gradients come last.
        step_s: the seconds of a step, where many follow each other.
        peak_bytes: the most bytes on a device.
        timeline: a few steps.
    """

    boundaries: tuple[int, ...]
    k: int
    step_s: float
    peak_bytes: int
    timeline: Timeline

    @property
    def num_buckets(self) -> int:
        """The number of buckets."""
        return len(self.boundaries) + 1


def choose_buckets(search: BucketSearch) -> BucketChoice:
    """Return the fastest choice that fits the memory; of equals, the smallest k.

    Raises:
        FitError: none fits, not even with k = 0; names the memory that works.
    """
    choices = [best_k(search, boundaries) for boundaries in search.cuts()]
    fitting = [x for x in choices if x.peak_bytes <= search.memory_bytes]
    if not fitting:
        least = min(choice.peak_bytes for choice in choices)
        raise FitError(
            f"reverse-first-k: the whole model on each device needs {byte_size(least)} "
            f"even with k = 0, and there are {byte_size(int(search.memory_bytes))}. "
            f"The smallest memory_bytes that works is {least}; more microbatches, a "
            "smaller batch, or a pipeline such as 1f1b need less",
            device=0,
            needed_bytes=least,
            memory_bytes=int(search.memory_bytes),
        )
    enough_s = min(choice.step_s for choice in fitting) * (1 + _AS_FAST)
    fast = (choice for choice in fitting if choice.step_s <= enough_s)
    return min(fast, key=lambda choice: (choice.k, choice.num_buckets))


def best_k(search: BucketSearch, boundaries: tuple[int, ...]) -> BucketChoice:
    """Return the fastest k for these buckets that fits the memory; 0 if none fits.

    The step's time has nearly one valley in k, so the golden section is taken between
    the neighbours of the best of a few k. Of the k that were simulated and are equally
    fast, it is the smallest.
    """
    known: dict[int, BucketChoice] = {}

    def seconds(k: int) -> float:
        if k not in known:
            known[k] = search.tried(boundaries, k)
        fits = known[k].peak_bytes <= search.memory_bytes
        return known[k].step_s if fits else inf

    # A larger k holds more: what does not fit is behind all that does.
    most = search.most_k(boundaries)
    few = sorted({round(i * most / _NUM_PARTS) for i in range(_NUM_PARTS + 1)})
    best = min(range(len(few)), key=lambda i: (seconds(few[i]), i))
    golden_section(seconds, few[max(0, best - 1)], few[min(len(few) - 1, best + 1)])
    enough_s = min(map(seconds, known)) * (1 + _AS_FAST)
    return known[min(k for k in known if seconds(k) <= enough_s)]


def golden_section(f: Callable[[int], float], low: int, high: int) -> int:
    """Return where a function of whole numbers with one valley is least.

    Args:
        f: called about 1.5 times for each doubling of the range.
        low: the first number.
        high: the last one.

    >>> golden_section(lambda x: abs(x - 30), 0, 100)
    30
    """
    ends = low, high
    while high - low > _FEW:
        a = round(high - _GOLDEN * (high - low))
        b = max(a + 1, round(low + _GOLDEN * (high - low)))
        if f(a) < f(b) * (1 - _AS_FAST) or f(b) == inf:
            high = b
        else:  # on the plain in front of the valley, too
            low = a
    found: int = min({*ends, *range(low, high + 1)}, key=lambda x: (f(x), x))
    return found


def steady_step_s(timeline: Timeline) -> float:
    """Return the mean time from a step's first forward to the next one's."""
    starts = [
        float(start_s)
        for op, start_s in zip(
            timeline.schedule.lanes[0].ops, timeline.start_s[0], strict=True
        )
        if (op.kind, op.stage, op.microbatch) == (Kind.FORWARD, 0, 0)
    ]
    return (starts[-1] - starts[_FULL_STEP]) / (len(starts) - 1 - _FULL_STEP)
