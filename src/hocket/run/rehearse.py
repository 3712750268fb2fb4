"""Play a worker's lane alone, before the first step, to see what its ops take in place.

Layers that are measured one at a time run hot: their weights are still in the caches,
and nothing comes between. In a lane, ops of several stages and microbatches follow each
other. So each worker plays its own lane a few times, all of them at the same time as
they will in training, but with no one to wait for:

    lane        0F0 │ 0F1 │ 0B0 │ 0F2 │ 0B1 │ ...     as scheduled
    messages     ▲     ▲     ▲                        stand ready: real outputs of the
                 └─────┴─────┘                        stages before, made-up gradients

Nothing is left behind: no gradient, no statistic of a batch norm, no random number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from time import perf_counter
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hocket.model.capture import Captured
from hocket.model.measure import as_it_was
from hocket.model.stage import StageModule
from hocket.plan.costs import MAX_JITTER, Costs, StageCost
from hocket.plan.op import Kind, Op
from hocket.plan.schedule import Lane, Schedule
from hocket.run.batch import Microbatch
from hocket.run.loss import LossFunction
from hocket.run.no_memory import MemoryWatch
from hocket.run.precision import Precision
from hocket.run.ring import Ring
from hocket.run.same_batch import Step
from hocket.run.stage import StageRunner
from hocket.run.work import Work
from hocket.run.worker import Hooks, Record, Worker
from hocket.run.world import World

_MIN_STEPS: Final = 3
_ENOUGH_S: Final = 0.3  # no further step once this has been spent
_QUARTILES: Final = 1.349  # how many standard deviations lie between them
_MADE_UP: Final = 1e-3  # each element of a gradient that another worker would send


@dataclass(frozen=True, slots=True)
class InPlace:
    """What one worker found.

    Args:
        seconds: of each of its stages, a forward and a backward.
        op_s: between two ops.
        jitter: of an op's seconds.
    """

    seconds: dict[int, tuple[float, float]]
    op_s: float
    jitter: float


class _Ready:
    """Stands in for the mail: every message is there, and those sent go nowhere."""

    def __init__(
        self,
        schedule: Schedule,
        device: int,
        modules: Sequence[StageModule],
        sent: Sequence[tuple[Tensor, ...]],
    ) -> None:
        stages = schedule.program.stages
        self._in: dict[tuple[Kind, int], tuple[Tensor, ...]] = {}
        self._out: set[tuple[Kind, int]] = set()
        for source, target in schedule.program.flows:
            ends = (stages[source].device, stages[target].device)
            if ends == (device, device) or device not in ends:
                continue
            if device == ends[1]:
                self._in[Kind.FORWARD, target] = sent[source]
                self._out.add((Kind.BACKWARD, target))
            else:
                grads = _gradients(modules[source], sent[source])
                self._in[Kind.BACKWARD, source] = grads
                self._out.add((Kind.FORWARD, source))

    def begin(self, step: Step) -> None:
        """Nothing to announce."""

    def flush(self) -> None:
        """Nothing to wait for."""

    def sends(self, kind: Kind, stage: int) -> bool:
        """As the mail would say."""
        return (kind, stage) in self._out

    def receives(self, kind: Kind, stage: int) -> bool:
        """As the mail would say."""
        return (kind, stage) in self._in

    def send(
        self,
        kind: Kind,
        stage: int,
        step: Step,
        microbatch: int,
        values: Sequence[Tensor],
    ) -> None:
        """Let it go."""

    def receive(
        self, kind: Kind, stage: int, step: Step, microbatch: int
    ) -> tuple[Tensor, ...]:
        """The same for every microbatch."""
        return self._in[kind, stage]

    def release(self, kind: Kind, stage: int, step: Step, microbatch: int) -> None:
        """It is kept."""


def rehearse(
    costs: Costs,
    captured: Captured,
    schedule: Schedule,
    modules: Sequence[StageModule],
    loss: LossFunction,
    microbatch: Microbatch,
    world: World,
    device: int,
    precision: Precision,
) -> Costs:
    """The costs with what every worker measured in its own lane.

    Every worker must call this.

    Args:
        costs: as added up from single layers; how a backward divides into I and W is
            kept.
        captured: the model.
        schedule: one step.
        modules: all stages.
        loss: as for the pipeline.
        microbatch: played as each of them.
        world: to begin together, and to tell the others.
        device: whose lane this worker plays.
        precision: what forwards and losses compute in.
    """
    with as_it_was(captured):
        for module in modules:
            module.train()
        runners = _runners(costs, schedule, modules, loss, world, device, precision)
        with precision.autocast(world.device):
            sent = _outputs(modules, microbatch)
        worker = Worker(
            _without_ends(schedule),
            device,
            runners,
            {},
            _Ready(schedule, device, modules, sent),
            Ring(),
            Hooks(on_error=MemoryWatch(schedule, costs, world, device).on_error),
        )
        parts = (microbatch,) * schedule.program.num_microbatches_of(0)
        sizes = tuple(part.num_samples for part in parts)
        work = Work(Step(0, 0, sum(sizes), sizes), parts)
        world.barrier("rehearsal")
        own = _measure(worker, list(runners.values()), work)
    told = [
        InPlace(
            {int(stage): (f, b) for stage, (f, b) in part["seconds"].items()},
            part["op_s"],
            part["jitter"],
        )
        for part in world.gather_json(asdict(own), "rehearsal")
    ]
    return replace(
        costs,
        stages=tuple(
            _corrected(cost, [part.seconds[i] for part in told if i in part.seconds])
            for i, cost in enumerate(costs.stages)
        ),
        op_s=fmean(part.op_s for part in told),
        jitter=fmean(part.jitter for part in told),
    )


def _runners(
    costs: Costs,
    schedule: Schedule,
    modules: Sequence[StageModule],
    loss: LossFunction,
    world: World,
    device: int,
    precision: Precision,
) -> dict[int, StageRunner]:
    last = len(modules) - 1
    return {
        stage: StageRunner(
            stage,
            modules[stage],
            loss if stage == last else None,
            device=world.device,
            seed=0,
            precision=precision,
            recomputes=costs.stages[stage].recomputes,
        )
        for stage in schedule.program.stages_on[device]
    }


def _outputs(
    modules: Sequence[StageModule], microbatch: Microbatch
) -> list[tuple[Tensor, ...]]:
    """What each stage but the last sends."""
    values: tuple[Tensor, ...] = ()
    sent = []
    with torch.no_grad():
        for module in modules[:-1]:
            own = [microbatch.leaves[i] for i in module.batch_inputs]
            values = module(*values, *own)
            sent.append(values)
    return sent


def _gradients(module: StageModule, sent: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Made-up ones of those outputs that want one."""
    return tuple(
        torch.full_like(tensor, _MADE_UP)
        for value, tensor in zip(module.sent, sent, strict=True)
        if value.requires_grad
    )


def _without_ends(schedule: Schedule) -> Schedule:
    """Forwards and backwards only: nothing is reduced or updated here."""
    kept = {Kind.FORWARD, Kind.BACKWARD}
    lanes = tuple(
        Lane(lane.device, lane.stream, tuple(op for op in lane.ops if op.kind in kept))
        for lane in schedule.lanes
    )
    return replace(schedule, lanes=lanes)


def _forget(runners: Sequence[StageRunner]) -> None:
    """Begin each step as in training: without gradients."""
    for runner in runners:
        runner.losses.clear()
        for parameter in runner.parameters.values():
            parameter.grad = None


def _measure(worker: Worker, runners: Sequence[StageRunner], work: Work) -> InPlace:
    _forget(runners)
    worker.play(work)
    records: list[Record] = []
    until = perf_counter() + _ENOUGH_S
    while len(records) < _MIN_STEPS or perf_counter() < until:
        _forget(runners)
        records.append(worker.play(work))
    return _found(worker.lane.ops, records)


def _found(ops: Sequence[Op], records: Sequence[Record]) -> InPlace:
    spent_s = np.array([record.end_s - record.start_s for record in records])
    rows: dict[tuple[int, Kind], list[int]] = {}
    for i, op in enumerate(ops):
        rows.setdefault((op.stage, op.kind), []).append(i)
    mean_s = {key: float(np.median(spent_s[:, of].mean(1))) for key, of in rows.items()}
    between_s = [
        record.start_s[1:] - record.end_s[:-1] for record in records if len(ops) > 1
    ]
    return InPlace(
        {
            stage: (
                mean_s[stage, Kind.FORWARD],
                mean_s.get((stage, Kind.BACKWARD), 0.0),
            )
            for stage in dict.fromkeys(stage for stage, _ in rows)
        },
        float(np.median(between_s)) if between_s else 0.0,
        fmean(_jitter(spent_s[:, of]) for of in rows.values()),
    )


def _jitter(spent_s: NDArray[np.float64]) -> float:
    """Standard deviation over mean, as the quartiles tell it: outliers do not count."""
    low, middle, high = np.quantile(spent_s, (0.25, 0.5, 0.75))
    return min(MAX_JITTER, float((high - low) / middle) / _QUARTILES)


def _corrected(cost: StageCost, found: Sequence[tuple[float, float]]) -> StageCost:
    """A stage's cost with the mean of what its replicas found."""
    forward_s, backward_s = map(fmean, zip(*found, strict=True))
    if cost.recomputes:  # once more, in the backward
        backward_s = max(0.0, backward_s - forward_s)
    whole_s = cost.input_grad_s + cost.weight_grad_s
    share = cost.input_grad_s / whole_s if whole_s else 1.0
    return replace(
        cost,
        forward_s=forward_s,
        input_grad_s=backward_s * share,
        weight_grad_s=backward_s * (1.0 - share),
    )
