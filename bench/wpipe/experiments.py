"""WPipe's experiments, on the simulator: beside 2BW, 1F1B and data parallelism.

Yang et al., "Group-based Interleaved Pipeline Parallelism for Large-scale DNN
Training", ICLR'22, https://openreview.net/forum?id=cw-EmNq5zfD. Its abstract says of
large BERTs: 1.4 times PipeDream-2BW's speed with 36 % less memory; it prints no
single numbers. Networks, layouts and the sweep over sizes are those of the scripts in
github.com/yangpc615/WPipe: a microbatch of 1 to 512 samples, with and without
recomputation, as many microbatches as devices.

What it ran on is not published but for "GPUs"; here it is what 2BW's own paper used
(eight p3.16xlarge: V100s of 16 GB, NVLink, 25 Gb/s; arXiv:2006.09503, section 5).

What docs/explanation/wpipe.md says of these numbers rests on this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean
from typing import Final

from bench.networks.resnext import resnext
from bench.networks.transformers import bert, deep_bert
from hocket.core.hardware import load_catalogue
from hocket.core.layout import WorkerLayout
from hocket.planner.candidate import DDP, Candidate, Outcome
from hocket.planner.cluster import Cluster
from hocket.planner.predict import Predictor
from hocket.planner.published.catalogue import CountedLayer
from hocket.planner.replicas.data_parallel import data_parallel_outcome
from hocket.planner.work import CountedCosts

PUBLISHED_TIMES: Final = 1.4  # of 2BW's speed
PUBLISHED_MEMORY: Final = 0.64  # of 2BW's
DEVICE: Final = "v100-16g"
LINK: Final = "nvlink2-mesh"
NETWORK: Final = "25gb"
PRECISION: Final = "float32"
DEVICES_PER_NODE: Final = 8

FLUSHED: Final = "1f1b"
TWO_BW: Final = "pipedream-2bw"
WPIPE: Final = "wpipe"
OVERLAPPED: Final = "wpipe-overlapped"
PIPELINES: Final = {FLUSHED: 1, TWO_BW: 1, WPIPE: 2, OVERLAPPED: 2}  # stages per device

SWEEP: Final = tuple(2**i for i in range(10))


@dataclass(frozen=True, slots=True)
class Experiment:
    """What was trained, and on what.

    Args:
        name: of the network, and what is done with it.
        make: its layers.
        layout: of the devices.
        samples: in a microbatch; several are a sweep, of which the fastest counts.
        is_published: whether the abstract's numbers are of such networks.
    """

    name: str
    make: Callable[[], tuple[CountedLayer, ...]]
    layout: str
    samples: tuple[int, ...] = SWEEP
    is_published: bool = False

    @property
    def shape(self) -> WorkerLayout:
        """The layout in numbers."""
        return WorkerLayout.parse(self.layout)

    @property
    def num_nodes(self) -> int:
        """That the devices are in."""
        return -(-self.shape.num_workers // DEVICES_PER_NODE)


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest of a sweep that fits the memory.

    Args:
        schedule: its name.
        num_samples: in a microbatch.
        recomputes: whether stages keep only their inputs.
        num_microbatches: of each replica.
        samples_per_s: over all replicas.
        peak_bytes: of the device that holds the most.
        mean_bytes: what a device holds at most, the mean over devices: as the paper's
            scripts report memory.
        weight_bytes: of it, one version of the weights.
        version_bytes: of it, older weights.
    """

    schedule: str
    num_samples: int
    recomputes: bool
    num_microbatches: int
    samples_per_s: float
    peak_bytes: int
    mean_bytes: float
    weight_bytes: float
    version_bytes: float

    @classmethod
    def of(cls, outcome: Outcome, num_samples: int) -> Best:
        """What is kept of an outcome."""
        candidate, memory = outcome.candidate, outcome.memory
        return cls(
            candidate.schedule,
            num_samples,
            candidate.recomputes,
            candidate.num_microbatches,
            outcome.samples_per_s,
            outcome.peak_bytes,
            fmean(split.total_bytes for split in memory),
            fmean(split.weight_bytes for split in memory),
            fmean(split.version_bytes for split in memory),
        )


@dataclass(frozen=True, slots=True)
class Result:
    """What the simulator makes of it.

    Args:
        experiment: what was simulated.
        best: of each schedule that fits, by its name; and of data parallelism.
        alike: WPipe with the microbatches and the recomputation of 2BW's best, whether
            it fits or not; None where 2BW does not fit at all.
    """

    experiment: Experiment
    best: dict[str, Best]
    alike: Best | None

    def times(self, name: str) -> float | None:
        """How many times as fast as 2BW's best; None where one of them does not fit."""
        if name not in self.best or TWO_BW not in self.best:
            return None
        return self.best[name].samples_per_s / self.best[TWO_BW].samples_per_s

    @property
    def times_alike(self) -> float | None:
        """The same of WPipe with 2BW's microbatches."""
        if self.alike is None:
            return None
        return self.alike.samples_per_s / self.best[TWO_BW].samples_per_s

    @property
    def memory_alike(self) -> float | None:
        """What WPipe's devices then hold, as a share of what 2BW's do."""
        if self.alike is None:
            return None
        return self.alike.mean_bytes / self.best[TWO_BW].mean_bytes


def _berts(num_blocks: int, *layouts: str) -> tuple[Experiment, ...]:
    name, make = f"BERT, {num_blocks} blocks", partial(deep_bert, num_blocks)
    return tuple(
        Experiment(name, make, layout, is_published=True) for layout in layouts
    )


def _resnexts(depth: int, *layouts: str) -> tuple[Experiment, ...]:
    make = partial(resnext, depth)
    return tuple(Experiment(f"ResNeXt-{depth}", make, layout) for layout in layouts)


_ONE_NODE: Final = ("8x1", "4x2", "2x4")
_EIGHT_NODES: Final = ("64x1", "32x2", "16x4", "8x8")

EXPERIMENTS: Final = (
    *_berts(96, *_ONE_NODE),
    *_berts(192, *_ONE_NODE),
    *_berts(384, *_EIGHT_NODES),
    *_berts(768, *_EIGHT_NODES),
    *_resnexts(200, *_ONE_NODE),
    *_resnexts(302, *_ONE_NODE),
    *_resnexts(500, *_EIGHT_NODES, "4x16"),
    *_resnexts(800, *_EIGHT_NODES, "4x16"),
    Experiment(
        "BERT-base, fine-tuning", partial(bert, 12, num_scored=0), "4x2", samples=(32,)
    ),
    Experiment(
        "BERT-large, fine-tuning", partial(bert, 24, num_scored=0), "4x2", samples=(16,)
    ),
    Experiment("ResNeXt-50, fine-tuning", partial(resnext, 50), "2x4", samples=(32,)),
    Experiment(
        "ResNeXt-101, fine-tuning",
        partial(resnext, 101, group_width=8),
        "2x4",
        samples=(32,),
    ),
)


# The name and the layout of each.
ORDER: Final = tuple((one.name, one.layout) for one in EXPERIMENTS)


def results(experiments: tuple[Experiment, ...] = EXPERIMENTS) -> Iterator[Result]:
    """Simulate them, one after another."""
    for experiment in experiments:
        yield _Sweep(experiment).result()


class _Sweep:
    """All sizes of one experiment."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        catalogue = load_catalogue()
        device = catalogue.device(DEVICE)
        num_nodes = experiment.num_nodes
        cluster = Cluster(
            experiment.shape.num_workers,
            device.usable_bytes,
            catalogue.link(LINK),
            catalogue.link(NETWORK) if num_nodes > 1 else None,
            num_nodes,
            device.name,
        )
        ops = tuple(layer.ops() for layer in experiment.make())
        work = CountedCosts(experiment.name, ops, device, PRECISION)
        self._predictors = cache(partial(Predictor, work, cluster))  # by batch size

    def result(self) -> Result:
        """Of every schedule."""
        found = {name: self._best(name) for name in (DDP, *PIPELINES)}
        best = {name: one for name, one in found.items() if one is not None}
        alike = None
        if TWO_BW in best:
            same = best[TWO_BW]
            outcome = self._outcome(WPIPE, same.num_samples, recomputes=same.recomputes)
            alike = Best.of(outcome, same.num_samples)
        return Result(self._experiment, best, alike)

    def _best(self, name: str) -> Best | None:
        """The fastest that fits, with and without recomputation."""
        fitting = [best for both in (False, True) for best in self._fitting(name, both)]
        return max(fitting, key=lambda best: best.samples_per_s, default=None)

    def _fitting(self, name: str, recomputes: bool) -> Iterator[Best]:
        """Sizes in their order, until one does not fit: larger ones take more."""
        for size in sorted(self._experiment.samples):
            outcome = self._outcome(name, size, recomputes=recomputes)
            if not outcome.fits:
                break
            yield Best.of(outcome, size)

    def _outcome(self, name: str, num_samples: int, *, recomputes: bool) -> Outcome:
        shape = self._experiment.shape
        p, r = shape.num_devices, shape.num_replicas
        m = max(p, 2 * (p - 1)) if name == OVERLAPPED else p
        candidate = Candidate(name, p, r, PIPELINES.get(name, 1), m, recomputes)
        if name == DDP:
            candidate = Candidate(DDP, 1, shape.num_workers, 1, 1, recomputes)
        batch_size = num_samples * candidate.num_microbatches * candidate.num_replicas
        predictor = self._predictors(batch_size)
        if candidate.is_data_parallel:
            return data_parallel_outcome(predictor, candidate)
        return predictor.outcome(candidate)
