"""The pipeline that users hold: train and evaluate their own model in parallel."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import DataError, RunError
from hocket.plan.buffers import buffers_without_waiting
from hocket.plan.check import check
from hocket.plan.op import ASYNCHRONOUS
from hocket.plan.schedule import Schedule
from hocket.plan.timeline import Timeline
from hocket.run.batch import Microbatch, call_arguments, digest, split_batch
from hocket.run.build import Plan, Request, build_plan
from hocket.run.crew import Crew, make_crew
from hocket.run.evaluate import EvaluationResult, Evaluator, Metrics
from hocket.run.gather import gather_state, gather_timeline
from hocket.run.layout import make_layout
from hocket.run.loader import check_last_batch, check_same_length, noted
from hocket.run.loss import TOTAL, LossFunction
from hocket.run.order import make_order
from hocket.run.reporting import reporting
from hocket.run.ring import Ring
from hocket.run.same_batch import Step
from hocket.run.seed import generators_kept
from hocket.run.transports import TransportName, make_transport
from hocket.run.update import OptimizerFactory, SchedulerFactory
from hocket.run.worker import Record, Work
from hocket.run.world import World, join_world


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step came to. Every worker gets the same losses.

    Args:
        step: numbered from 0 over the life of the pipeline.
        loss: what is trained, the mean over the batch's samples.
        losses: every scalar that the loss function names, likewise.
        num_samples: of the whole batch, over all replicas.
        seconds: the step took on this worker.
        bubble_fraction: the share of them in which this worker's lane did not work.
        peak_bytes: the most memory that this worker has held so far (on the GPU, or
            the process's resident set on a CPU).
    """

    step: int
    loss: float
    losses: dict[str, float]
    num_samples: int
    seconds: float
    bubble_fraction: float
    peak_bytes: int


class Pipeline:
    """Trains a model in stages on several workers.

    Every worker makes the same Pipeline from the same model, and iterates over the same
    batches; the pipeline hands each its part. It joins the torchrun job it runs in, or
    the workers that `hocket.launch` started; alone, it is a pipeline of one device.

    Args:
        model: any module; each worker keeps its stages of it and trains them in place.
        loss: `loss(output, targets)` returns the mean over a microbatch's samples, as a
            scalar tensor or a dict of named ones (see `hocket.run.loss`).
        optimizer: called on each stage with its parameters.
        example: a batch `(inputs, targets)` as the loader will give them. The inputs
            are a tensor, a tuple of positional or a dict of keyword arguments.
        schedule: the name of a registered schedule, or a Schedule of one step.
        num_microbatches: parts of the batch in each replica.
        num_replicas: copies of the pipeline on other workers, each with its part of
            every batch.
        stages_per_device: where the schedule lets one choose.
        cut: the modules with which stages 1, 2, ... begin; balanced by a profile when
            not given.
        profile_dir: where profiles are kept and found again.
        scheduler: makes each stage's learning-rate schedule; stepped at every update.
        seed: for random numbers in the forward (dropout).
        timeout_s: after which any wait for another worker ends in an error; what
            `hocket.launch` was given, or 60, when not given.
        run_dir: where reports of failures go; `hocket.launch` says so itself. Under
            torchrun they go to the current folder when not given.
        transport: what carries messages between workers: "shared-memory" (on one host),
            "torch" (torch.distributed: gloo or NCCL), or "auto", which takes the first
            wherever it can.
        world: the job, where it is joined already (several pipelines in one job).

    Raises:
        ModelError: the model cannot be captured or cut as asked.
        ShapeError: the schedule's constraints refuse the numbers.
        DataError: the example is no batch, or smaller than the microbatches.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        *,
        optimizer: OptimizerFactory,
        example: Any,
        schedule: str | Schedule = "1f1b",
        num_microbatches: int = 8,
        num_replicas: int = 1,
        stages_per_device: int | None = None,
        cut: Sequence[str] | None = None,
        profile_dir: str | Path | None = None,
        scheduler: SchedulerFactory | None = None,
        seed: int = 0,
        timeout_s: float | None = None,
        run_dir: str | Path | None = None,
        transport: TransportName = "auto",
        world: World | None = None,
    ) -> None:
        self._stack = contextlib.ExitStack()
        if world is None:
            world = join_world(timeout_s=timeout_s)
            self._stack.callback(world.close)
        self.world = world
        self._ring = self._stack.enter_context(_ring(world, run_dir))
        timeout_s = world.timeout_s if timeout_s is None else timeout_s
        self._why_ended = ""
        self._step = 0
        self._record: Record | None = None
        with self._reported():
            self._layout = make_layout(self.world, num_replicas)
            self._num_parts = num_microbatches * num_replicas
            order = make_order(
                schedule, self._layout, num_microbatches, stages_per_device
            )
            microbatches = split_batch(example, self._num_parts)
            store = _own_store(self.world)
            carrier = make_transport(
                transport,
                self.world,
                store,
                self._ring,
                num_buffers=_num_buffers(order),
                timeout_s=timeout_s,
            )
            self._stack.callback(carrier.close)
            request = Request(
                model,
                loss,
                optimizer,
                microbatches[0],
                pytree.tree_structure(call_arguments(example[0])),
                cut,
                None if profile_dir is None else Path(profile_dir),
            )
            self.plan: Plan
            self.plan, modules = build_plan(
                request, order, self.world, self._layout, carrier
            )
            self._model = model
            self._crew: Crew = make_crew(
                self.plan,
                modules,
                loss,
                optimizer,
                scheduler,
                self.world,
                store,
                self._layout,
                self._ring,
                carrier,
                seed=seed,
                timeout_s=timeout_s,
            )
            self._evaluator = Evaluator(
                self._crew,
                self.world,
                self._layout,
                self._ring,
                loss,
                self.plan,
                timeout_s=timeout_s,
            )

    @property
    def is_main(self) -> bool:
        """Whether this worker is the one that should print and write."""
        return self.world.rank == 0

    @property
    def predicted(self) -> Timeline:
        """The simulated timeline of one step."""
        return self.plan.predicted

    def train(self, loader: Iterable[Any]) -> Iterator[StepResult]:
        """Train one step on each batch of a loader.

        Args:
            loader: yields the same batches `(inputs, targets)` on every worker. The
                last one may be smaller.

        Raises:
            DataError: a batch has fewer samples than microbatches; told before the
                first step where the loader's sizes are known.
            ModelError: a batch differs from the example in more than the samples.
            RunError: something went wrong; nothing hangs, and the pipeline is of no
                more use.
        """
        self._check_loader(loader)
        check_last_batch(loader, self._num_parts)
        for batch in noted(loader, self._ring, self._step, "next batch"):
            yield self.step(batch)

    def step(self, batch: Any) -> StepResult:
        """Train one step on one batch `(inputs, targets)`.

        Raises:
            DataError: the batch has fewer samples than microbatches.
            ModelError: the batch differs from the example in more than the samples.
            RunError: something went wrong; nothing hangs, and the pipeline is of no
                more use.
        """
        begin_s = perf_counter()
        work = self._work(batch)
        with self._reported(), generators_kept(self.world.device):
            self._crew.begin(work)
            record = self._crew.worker.play(work)
            self._ring.begin("losses", self._step)
            named = self._crew.results.finish(self._step)
            self._ring.end()
        self._record = record
        self._step += 1
        seconds = perf_counter() - begin_s
        return StepResult(
            work.step.number,
            named[TOTAL],
            named,
            work.step.num_samples,
            seconds,
            1.0 - self._busy_s(record) / seconds,
            self._peak_bytes(),
        )

    def evaluate(
        self, loader: Iterable[Any], metrics: Metrics | None = None
    ) -> EvaluationResult:
        """Run a loader through the model in evaluation mode, forward only.

        Args:
            loader: yields the same batches on every worker; any size will do.
            metrics: `metrics(output, targets)` returns named means over a microbatch's
                samples.

        Returns:
            Means over all samples, the same on every worker.
        """
        self._check_loader(loader)
        with self._reported(), generators_kept(self.world.device):
            return self._evaluator.evaluate(loader, metrics)

    def measured(self) -> Timeline:
        """The measured timeline of the last step; every worker must call this.

        Raises:
            DataError: no step has been trained yet.
        """
        if self._record is None:
            raise DataError("no step has been trained yet, so there is none to show")
        with self._reported():
            return gather_timeline(self.plan, self._record, self.world, self._layout)

    def state_dict(self) -> dict[str, Tensor]:
        """Weights and buffers by the uncut model's names; every worker must call this.

        Returns:
            The whole model's, the same on every worker.
        """
        with self._reported():
            return gather_state(self._model, self._crew, self.plan, self._layout)

    def close(self) -> None:
        """Let go of the other workers, when all of them have come here.

        Whoever left earlier would break off what another still receives.
        """
        if not self._why_ended:
            with self._reported():
                self.world.barrier("the end of the pipeline")
        self._why_ended = self._why_ended or "it was closed"
        self._stack.close()

    def __enter__(self) -> Pipeline:
        """Use as `with Pipeline(...) as pipeline`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, and report an error that ended the block."""
        if error is None:
            self.close()
        else:
            self._why_ended = f"{type(error).__name__} in step {self._step}"
            self._stack.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Leave a report of whatever ends the block, and let go of the others."""
        if self._why_ended:
            raise RunError(
                f"this pipeline has ended ({self._why_ended}): make another one"
            )
        try:
            yield
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def _work(self, batch: Any) -> Work:
        parts = split_batch(batch, self._num_parts, self.plan.example)
        mine = _share(parts, self._layout.replica, self._layout.num_replicas)
        num_samples = sum(part.num_samples for part in parts)
        sizes = tuple(part.num_samples for part in mine)
        return Work(Step(self._step, digest(batch), num_samples, sizes), mine)

    def _check_loader(self, loader: Iterable[Any]) -> None:
        with self._reported():
            check_same_length(loader, self.world)

    def _busy_s(self, record: Record) -> float:
        works = [op.kind not in ASYNCHRONOUS for op in self._crew.worker.lane.ops]
        return float((record.end_s - record.start_s)[works].sum())

    def _peak_bytes(self) -> int:
        if self.world.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.world.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def _ring(world: World, run_dir: str | Path | None) -> Iterator[Ring]:
    """What remembers the last ops; alone and without a folder, only in memory."""
    if world.world_size == 1 and run_dir is None:
        yield Ring()
        return
    with reporting(world, Path("." if run_dir is None else run_dir)) as ring:
        yield ring


def _num_buffers(order: Schedule) -> int:
    """Enough that no sender waits for a reader that is busy, and one for headers."""
    return max(check(order).num_buffers, buffers_without_waiting(order)) + 1


_num_pipelines = count()


def _own_store(world: World) -> dist.Store:
    """The job's store, with a prefix of this pipeline's own.

    Workers make their pipelines in one order, so that equal numbers mean the same one.
    """
    return dist.PrefixStore(f"pipeline {next(_num_pipelines)}", world.store)


def _share(
    parts: tuple[Microbatch, ...], replica: int, num_replicas: int
) -> tuple[Microbatch, ...]:
    """The microbatches of one replica."""
    size = len(parts) // num_replicas
    return parts[replica * size : (replica + 1) * size]
