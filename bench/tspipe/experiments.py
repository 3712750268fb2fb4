"""TSPipe's experiments, on the simulator: beside model parallelism, GPipe and others.

Lim et al., "TSPipe: Learn from Teacher Faster with Pipelines", ICML'22: samples per
second on eight V100s of 32 GB (a DGX-1), by inter-layer model parallelism, GPipe and
TSPipe, from the authors' poster; and 12.15 times model parallelism for MoCo-v3 on 16.
Batches are those of the released scripts, which need not be the paper's. Microbatches
are p - 1 of each of two views, as TSPipe's, and p of one; GPipe's are not published,
and are as many here.

The released code drops a quarter of the gradient, and half of it in distillation
(shown by running it), and has one stage of each net per device, cut by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from bench.networks.transformers import transformer
from bench.networks.vision import resnet, vit
from hocket.core.hardware import load_catalogue
from hocket.planner.cluster import Cluster
from hocket.planner.published.catalogue import CountedLayer
from hocket.planner.teachers.compare import (
    Comparison,
    TeacherJob,
    TeacherPipeline,
    compare,
    predict_pipeline,
)
from hocket.planner.work import CountedCosts

DEVICE: Final = "v100-32g"
LINK: Final = "nvlink2-mesh"
NETWORK: Final = "100gb"
PRECISION: Final = "float32"
DEVICES_PER_NODE: Final = 8
OURS: Final = ("gpipe", "1f1b", "zb-h1")

_NUM_TOKENS: Final = 128  # of the at most 512; how many there were is not published

Make = Callable[[], tuple[CountedLayer, ...]]


@dataclass(frozen=True, slots=True)
class Experiment:
    """What was trained, and on what.

    Args:
        method: how.
        nets: their names.
        teacher: its layers.
        student: its layers.
        batch_size: rows of a step, of both views together.
        follows: whether the teacher is a momentum teacher, one update late.
        num_devices: V100s.
        published: samples per second of model parallelism, GPipe and TSPipe.
    """

    method: str
    nets: str
    teacher: Make
    student: Make
    batch_size: int
    follows: bool
    num_devices: int
    published: tuple[float, float, float] | None

    @property
    def num_views(self) -> int:
        """Of each sample."""
        return 2 if self.follows else 1

    @property
    def num_microbatches(self) -> int:
        """TSPipe's p - 1 of each of two views; p of one, which divides the batches."""
        p = self.num_devices
        return 2 * (p - 1) if self.follows else p

    def samples_per_s(self, step_s: float) -> float:
        """Samples, not views of them."""
        return self.batch_size / self.num_views / step_s


@dataclass(frozen=True, slots=True)
class Result:
    """What the simulator makes of it.

    Args:
        experiment: what was simulated.
        naive_s: one device at a time, view by view: all work in sequence, without its
            messages, and whatever the memory.
        gpipe: GPipe with TSPipe's microbatches; its `same_batch_s` counts, and
            `step_s` is TSPipe.
        ours: the fastest of hocket's with as many microbatches.
        free: the fastest with any number of microbatches and replicas, and data
            parallelism.
    """

    experiment: Experiment
    naive_s: float
    gpipe: TeacherPipeline | None
    ours: TeacherPipeline | None
    free: Comparison


def _kd(teacher: str, depth: int, *published: float) -> Experiment:
    nets = f"{teacher} / ResNet-{depth}"
    student = partial(resnet, depth)
    numbers = published[0], published[1], published[2]
    return Experiment("KD", nets, partial(vit, teacher), student, 16, False, 8, numbers)


def _bert(num_blocks: int, width: int) -> Make:
    return partial(
        transformer,
        num_blocks,
        width,
        width // 64,
        _NUM_TOKENS,
        num_words=30522,
        num_scored=_NUM_TOKENS,
    )


def _byol(depth: int, *published: float) -> Experiment:
    make = partial(resnet, depth)
    numbers = published[0], published[1], published[2]
    return Experiment("BYOL", f"ResNet-{depth}", make, make, 512, True, 8, numbers)


def _moco(name: str, num_devices: int = 8, *published: float) -> Experiment:
    make = partial(vit, name)
    numbers = (published[0], published[1], published[2]) if published else None
    return Experiment("MoCo-v3", name, make, make, 256, True, num_devices, numbers)


EXPERIMENTS: Final = (
    _kd("ViT-Large", 101, 57.41, 136.8, 204.4),
    _kd("ViT-Large", 152, 47.24, 126.6, 180.7),
    _kd("ViT-Huge", 101, 35.65, 100.6, 148.5),
    _kd("ViT-Huge", 152, 30.30, 84.03, 141.8),
    Experiment(
        "DistilBERT",
        "BERT-xlarge / 12 of 24 blocks",
        _bert(24, 2048),
        _bert(12, 2048),
        24,
        False,
        8,
        (62.82, 113.3, 193.4),
    ),
    Experiment(
        "DistilBERT",
        "BERT-xxlarge / 24 of 48 blocks",
        _bert(48, 2560),
        _bert(24, 2560),
        24,
        False,
        8,
        (30.36, 75.22, 98.82),
    ),
    _byol(18, 346.3, 585.1, 728.5),
    _byol(50, 102.0, 232.0, 295.8),
    _byol(101, 71.25, 162.7, 243.0),
    _byol(152, 53.33, 136.9, 201.6),
    _moco("ViT-Small", 8, 99.42, 259.9, 365.7),
    _moco("ViT-Base", 8, 35.06, 106.7, 176.6),
    _moco("ViT-Large", 8, 11.31, 33.95, 54.70),
    _moco("ViT-Huge", 8, 5.496, 18.71, 35.26),
    _moco("ViT-Huge", 16),
)


def results(experiments: tuple[Experiment, ...] = EXPERIMENTS) -> Iterator[Result]:
    """Simulate them, one after another."""
    for experiment in experiments:
        yield _simulated(experiment)


def _naive_s(job: TeacherJob, num_views: int) -> float:
    each = job.batch_size // num_views
    student, teacher = job.student.layers(each), job.teacher.layers(each)
    trained_s = sum(layer.forward_s + layer.backward_s for layer in student)
    return num_views * (trained_s + sum(layer.forward_s for layer in teacher))


def _simulated(experiment: Experiment) -> Result:
    catalogue = load_catalogue()
    device = catalogue.device(DEVICE)
    num_nodes = -(-experiment.num_devices // DEVICES_PER_NODE)
    cluster = Cluster(
        experiment.num_devices,
        device.usable_bytes,
        catalogue.link(LINK),
        catalogue.link(NETWORK) if num_nodes > 1 else None,
        num_nodes,
        device.name,
    )

    def counted(make: Make) -> CountedCosts:
        ops = tuple(layer.ops() for layer in make())
        return CountedCosts(experiment.nets, ops, device, PRECISION)

    job = TeacherJob(
        counted(experiment.student),
        counted(experiment.teacher),
        1 if experiment.follows else None,
        experiment.batch_size,
    )
    p, m = experiment.num_devices, experiment.num_microbatches
    found = {name: predict_pipeline(job, cluster, name, p, m) for name in OURS}
    fitting = [x for x in found.values() if x is not None]
    return Result(
        experiment,
        _naive_s(job, experiment.num_views),
        found["gpipe"],
        min(fitting, key=lambda x: x.step_s, default=None),
        compare(job, cluster),
    )
