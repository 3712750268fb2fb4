"""The pipeline experiments of out-of-order backprop, on the simulator.

Oh et al., "Out-Of-Order BackProp", EuroSys'22, doi 10.1145/3492321.3519563: BERT on
V100s, fine-tuned and pre-trained, beside GPipe without recomputation. Numbers of
devices, samples and microbatches are those of its artifact's scripts. The paper says
1.41 to 1.99 times GPipe for all of them together; it prints no single numbers.

RNN-16, FFNN-16 and GPT-3 Medium are networks of the paper, too, but not of the
artifact: their sizes and settings are chosen here.

What docs/explanation/ooo-pipeline.md says of these numbers rests on this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from bench.networks.transformers import bert, dense, gpt3_medium, recurrent
from hocket.core.hardware import Catalogue, load_catalogue
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.errors import ShapeError
from hocket.planner.candidate import Candidate
from hocket.planner.cluster import Cluster
from hocket.planner.predict import Predictor
from hocket.planner.published.catalogue import CountedLayer
from hocket.planner.rank import Search, rank
from hocket.planner.work import CountedCosts
from hocket.schedules import SCHEDULES, make_schedule

PUBLISHED: Final = (1.41, 1.99)
DEVICE: Final = "v100-16g"
PRECISION: Final = "float32"
_FAST_FORWARD: Final = "ooo-fast-forward"
_MODULO: Final = "ooo-modulo"


@dataclass(frozen=True, slots=True)
class Experiment:
    """What was trained, and on what.

    Args:
        name: of the network, and what is done with it.
        layers: of the network.
        batch_size: samples per step.
        num_microbatches: of them.
        num_devices: V100s.
        num_nodes: that they are in.
        network: between nodes.
        groups_per_device: in which layers are dealt out; 1 is gradient fast-forwarding
            alone. As in the artifact, where it has the experiment.
        is_published: whether the paper's range is of it.
    """

    name: str
    layers: tuple[CountedLayer, ...]
    batch_size: int
    num_microbatches: int
    num_devices: int
    num_nodes: int = 1
    network: str = "25gb"
    groups_per_device: int = 1
    is_published: bool = True

    @property
    def ideal(self) -> float:
        """How many times faster than GPipe its order is on equal layers.

        F, I and W take equally long, and messages nothing: `3 (m + p - 1)` over
        `3 m + (p - 1) / v`.
        """
        p, m, v = self.num_devices, self.num_microbatches, self.groups_per_device
        return 3 * (m + p - 1) / (3 * m + (p - 1) / v)


@dataclass(frozen=True, slots=True)
class Result:
    """What the simulator makes of it.

    Args:
        experiment: what was simulated.
        gpipe_s: a step of GPipe.
        recomputing_s: the same where stages keep only their inputs, as GPipe's own
            paper has it.
        fast_forward: how many times faster gradient fast-forwarding is.
        modulo: how many times faster with modulo allocation, too; 0 where that
            cannot be had.
        group_size: layers that go to one device together, in the fastest of those.
        best: the fastest of all schedules that fit the memory, and how much faster.
        limit: how many times faster any order on the same stages could be.
    """

    experiment: Experiment
    gpipe_s: float
    recomputing_s: float
    fast_forward: float
    modulo: float
    group_size: int
    best: tuple[str, float]
    limit: float

    @property
    def theirs(self) -> float:
        """How many times faster the experiment's own order is."""
        deals_out = self.experiment.groups_per_device > 1
        return self.modulo if deals_out else self.fast_forward

    @property
    def beside_recomputing(self) -> float:
        """The same, beside GPipe with recomputation."""
        return self.theirs * self.recomputing_s / self.gpipe_s


EXPERIMENTS: Final = (
    Experiment("BERT-24, MRPC", bert(24, num_scored=0), 96, 4, 4, groups_per_device=6),
    Experiment("BERT-24, MRPC, Ethernet", bert(24, num_scored=0), 96, 4, 4, 4, "10gb"),
    Experiment("BERT-12, pre-training", bert(12, num_scored=20), 480, 30, 8),
    Experiment("BERT-24, pre-training", bert(24, num_scored=20), 320, 32, 16, 2),
    Experiment("BERT-36, pre-training", bert(36, num_scored=20), 380, 38, 24, 3),
    Experiment("BERT-48, pre-training", bert(48, num_scored=20), 320, 40, 32, 4),
    Experiment(
        "GPT-3 Medium",
        gpt3_medium(512),
        batch_size=32,
        num_microbatches=8,
        num_devices=8,
        groups_per_device=3,
        is_published=False,
    ),
    Experiment(
        "RNN-16",
        recurrent(16, 1024, 64),
        batch_size=256,
        num_microbatches=4,
        num_devices=4,
        groups_per_device=4,
        is_published=False,
    ),
    Experiment(
        "FFNN-16",
        dense(16, 4096),
        batch_size=4096,
        num_microbatches=4,
        num_devices=4,
        groups_per_device=4,
        is_published=False,
    ),
)


def results(experiments: tuple[Experiment, ...] = EXPERIMENTS) -> Iterator[Result]:
    """Simulate them, one after another."""
    catalogue = load_catalogue()
    for experiment in experiments:
        yield _result(experiment, catalogue)


def _result(experiment: Experiment, catalogue: Catalogue) -> Result:
    predictor = _predictor(experiment, catalogue)
    p, m = experiment.num_devices, experiment.num_microbatches
    gpipe = predictor.outcome(Candidate("gpipe", p, 1, 1, m))
    recomputing = predictor.outcome(Candidate("gpipe", p, 1, 1, m, recomputes=True))
    pushes = {"push": True} if m > p else {}
    fast = make_schedule(_FAST_FORWARD, num_devices=p, num_microbatches=m, **pushes)
    by_size = dict(_modulo_steps(experiment, predictor))
    size = min(by_size, key=lambda size: by_size[size], default=0)
    name, best_s = _best(experiment, predictor)
    return Result(
        experiment,
        gpipe.step_s,
        recomputing.step_s,
        gpipe.step_s / _step_s(predictor, fast, 1),
        gpipe.step_s / by_size[size] if by_size else 0.0,
        size,
        (name, gpipe.step_s / best_s),
        gpipe.step_s / gpipe.bound_s,
    )


def _predictor(experiment: Experiment, catalogue: Catalogue) -> Predictor:
    device = catalogue.device(DEVICE)
    cluster = Cluster(
        experiment.num_devices,
        device.usable_bytes,
        catalogue.link("nvlink2-mesh"),
        catalogue.link(experiment.network) if experiment.num_nodes > 1 else None,
        experiment.num_nodes,
        device.name,
    )
    ops = tuple(layer.ops() for layer in experiment.layers)
    work = CountedCosts(experiment.name, ops, device, PRECISION)
    return Predictor(work, cluster, experiment.batch_size)


def _step_s(predictor: Predictor, schedule: Schedule, per_device: int) -> float:
    program = schedule.program
    name, m = "", program.num_microbatches_of(0)
    candidate = Candidate(name, program.num_devices, 1, per_device, m)
    return simulate(schedule, predictor.costs(candidate)).makespan_s


def _modulo_steps(
    experiment: Experiment, predictor: Predictor
) -> Iterator[tuple[int, float]]:
    """Steps by the size of a group: each number of groups that goes round evenly."""
    p, num_layers = experiment.num_devices, len(experiment.layers)
    for per_device in range(2, num_layers // p + 1):
        try:
            schedule = make_schedule(
                _MODULO,
                num_devices=p,
                num_microbatches=experiment.num_microbatches,
                stages_per_device=per_device,
            )
        except ShapeError:
            continue
        group = -(-num_layers // (p * per_device))
        yield group, _step_s(predictor, schedule, per_device)


def _best(experiment: Experiment, predictor: Predictor) -> tuple[str, float]:
    """Of all schedules of the table, on these devices with these microbatches."""
    search = Search(
        schedules=tuple(sorted(SCHEDULES)),
        num_devices=(experiment.num_devices,),
        num_microbatches=(experiment.num_microbatches,),
        recompute=(False,),
        data_parallel=False,
        num_best=1,
    )
    ranking = rank(predictor.work, predictor.cluster, experiment.batch_size, search)
    best = ranking.fastest or ranking.outcomes[0]
    return best.candidate.schedule, best.step_s
