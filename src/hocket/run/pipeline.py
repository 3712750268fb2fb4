"""The public Pipeline: trains and evaluates a user's model in parallel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hocket.core.schedule import Schedule
from hocket.core.timelines.timeline import Timeline
from hocket.planner.recompute import RecomputeName
from hocket.run.assembly import PipelineConfig, assemble
from hocket.run.cluster.world import World
from hocket.run.comm.transports import TransportName
from hocket.run.data.loader import check_last_batch, check_same_length, recorded_batches
from hocket.run.data.loss import LossFunction
from hocket.run.data.metrics import Metrics, check_metrics
from hocket.run.data.step_batch import NetBatches, grouped, make_step_batches
from hocket.run.diagnostics.job_folder import Json
from hocket.run.engine.driver import Driver, drains_after
from hocket.run.engine.evaluate import EvaluationResult
from hocket.run.engine.gather import gather_state, holders_of
from hocket.run.engine.plan import Plan
from hocket.run.engine.sync.step_result import StepResult
from hocket.run.engine.timeline import gather_timeline
from hocket.run.engine.worker_loader import worker_loader
from hocket.run.engine.worker_run import WorkerRun
from hocket.run.stage.seed import preserve_generators
from hocket.run.weights.correction.correction import CorrectionName
from hocket.run.weights.settings import (
    OptimizerFactory,
    PrecisionName,
    SchedulerFactory,
    TrainingConfig,
    precision_of,
)


class Pipeline(WorkerRun):
    """Trains a model in stages on several workers.

    Every worker makes the same Pipeline from the same model, and iterates over the same
    batches; each worker takes its part. The pipeline joins the torchrun job it runs in,
    or the workers that `hocket.launch` started; alone, it has one device.

    Args:
        model: any module; each worker keeps its stages of it and trains them in place.
            Nothing else of it is kept: if the user keeps no reference, the weights of
            the other workers' stages are freed.
        loss: `loss(output, targets)` returns the mean over a microbatch's samples, as a
            scalar tensor or a dict of named ones (see `hocket.run.data.loss`). One that
            compares samples is refused where batches are cut, unless it is given as
            `hocket.PerMicrobatch(loss)`.
        optimizer: called on each stage with its parameters, a list that also has
            `named()`, for groups by name.
        example: a batch `(inputs, targets)` as the loader will give them. The inputs
            are a tensor, a tuple of positional or a dict of keyword arguments.
        schedule: the name of a registered schedule; or a Schedule of one step (of
            several with a body, where steps overlap), or the path of a file with one
            (PyTorch's CSV, *.csv, or text, *.txt); or "auto",
            the fastest that fits the memory, as a profile predicts it. "zb-auto" is
            made for what is measured here.
        max_delay: by how many updates the weights of stages may be stale if "auto"
            chooses: 1 lets it choose flush-free orders.
        num_microbatches: parts of the batch in each replica.
        num_replicas: copies of the pipeline on other workers, each with its part of
            every batch.
        stages_per_device: stages on each device, if the schedule has a choice.
        cut: the modules with which stages 1, 2, ... begin; balanced by a profile when
            not given.
        profile_dir: the folder in which profiles are kept and found again.
        scheduler: makes each stage's learning-rate schedule; stepped at every update.
        clip_norm: the largest total norm (2-norm) of all gradients; larger ones are
            scaled down, as `torch.nn.utils.clip_grad_norm_` does it.
        accumulate: batches per update. Each runs in the schedule's order; gradients add
            up over them, weighted by samples.
        precision: the type that forwards compute in: "bfloat16" and "float16" use
            autocast, the latter with a loss scale. Weights keep their types.
        ema_decay: keep averaged weights too, which each update moves by `1 - ema_decay`
            of the way to the new ones.
        correction: the correction for stale gradients, if the schedule has stages with
            a delay: "none", "error-feedback", "weight-prediction" or "lr-discount".
        num_discounted_updates: the updates over which "lr-discount" fades; 1000 when
            not given. A quarter of the training is a good number, if its length is
            known.
        recompute: which stages keep only their input between forward and backward,
            and run the forward once more in the backward: "none", "all", or "auto",
            the fewest that let every device fit its memory. Results stay the same.
        compile: compile each stage before the first step, for the sizes of the
            example's microbatches; other sizes run uncompiled, and so does a stage that
            cannot be compiled, with a warning that says why.
        memory_bytes: the memory for tensors on each device, for "auto" and for orders
            that are made for it ("zb-auto"); nine tenths of the smallest device's
            memory when not given.
        seed: the seed of random numbers in the forward (dropout).
        timeout_s: how long to wait for another worker before an error; what
            `hocket.launch` was given, or 60, when not given.
        run_dir: the folder for reports of failures; `hocket.launch` sets it. Under
            torchrun it is the current folder when not given.
        transport: what carries messages between workers: "shared-memory" (on one host),
            "torch" (torch.distributed: gloo or NCCL), or "auto", which uses the first
            wherever it can.
        world: the job, if it is joined already (several pipelines in one job).

    Raises:
        ModelError: the model cannot be captured or cut as asked.
        ShapeError: the schedule's constraints refuse the numbers.
        ParseError: the schedule's file cannot be read.
        ScheduleError: the given schedule must not run; gives everything wrong with it.
        DataError: the example is no batch, or smaller than the microbatches.
        FitError: a device has too little memory even if all its stages recompute, or
            for any order that is made for it; names the smallest that works.
        ConfigError: a setting that makes no sense.

    Warns:
        RepeatingBubbleWarning: "v-min" or "v-half" waits in every microbatch, with the
            measured times; warned on the main worker.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        *,
        optimizer: OptimizerFactory,
        example: Any,
        schedule: str | Path | Schedule = "1f1b",
        max_delay: int = 0,
        num_microbatches: int = 8,
        num_replicas: int = 1,
        stages_per_device: int | None = None,
        cut: Sequence[str] | None = None,
        profile_dir: str | Path | None = None,
        scheduler: SchedulerFactory | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        precision: PrecisionName = "float32",
        ema_decay: float | None = None,
        correction: CorrectionName = "none",
        num_discounted_updates: int | None = None,
        recompute: RecomputeName = "none",
        compile: bool = False,  # noqa: A002 (torch's name for it)
        memory_bytes: int | None = None,
        seed: int = 0,
        timeout_s: float | None = None,
        run_dir: str | Path | None = None,
        transport: TransportName = "auto",
        world: World | None = None,
    ) -> None:
        self._settings = TrainingConfig(
            optimizer,
            scheduler,
            clip_norm,
            accumulate,
            precision_of(precision),
            ema_decay,
            correction,
            num_discounted_updates,
        )
        super().__init__("pipeline", world, timeout_s, run_dir)
        with self._reported():
            config = PipelineConfig(
                model=model,
                loss=loss,
                settings=self._settings,
                example=example,
                schedule=schedule,
                max_delay=max_delay,
                num_microbatches=num_microbatches,
                num_replicas=num_replicas,
                stages_per_device=stages_per_device,
                cut=cut,
                profile_dir=profile_dir,
                recompute=recompute,
                compiles=compile,
                memory_bytes=memory_bytes,
                seed=seed,
                transport=transport,
            )
            parts = assemble(
                config, self.world, self._recorder, self._stack, self._timeout_s
            )
        self.plan: Plan = parts.plan
        self._num_parts = config.num_parts
        nets = parts.plan.schedule.program.nets
        self._counts = {net.name: net.num_microbatches for net in nets}
        self._layout = parts.layout
        self._outline = parts.outline
        self._executor = parts.executor
        self._driver = Driver(parts.executor, self._recorder, self._playing)
        self._checkpoints = parts.checkpoints
        self._evaluator = parts.evaluator

    @property
    def is_main(self) -> bool:
        """Whether this worker is the one that should print and write."""
        return self.world.rank == 0

    @property
    def predicted(self) -> Timeline:
        """The simulated timeline of `plan.schedule`: a step, or overlapping ones."""
        return self.plan.predicted

    @property
    def num_steps(self) -> int:
        """Steps that were trained or begun, over the whole run."""
        return self._step

    def train(
        self,
        loader: Iterable[Any],
        *,
        drain_every: int | Callable[[int], bool] | None = None,
    ) -> Iterator[StepResult]:
        """Train one step on each batch of a loader, or on each `accumulate` of them.

        A flush-free order has several steps in flight: it reads some batches ahead of
        the result that it yields. Evaluating or saving within the loop finishes all of
        them first; no result depends on that.

        Args:
            loader: yields the same batches `(inputs, targets)` on every worker. The
                last one may be smaller, and the last step have fewer of them.
            drain_every: finish all steps in flight after so many steps, counted over
                the whole run, or after those for whose numbers a function returns True:
                evaluations and saves at the results of these steps see exactly their
                weights.

        Raises:
            DataError: a batch has fewer samples than microbatches; raised before the
                first step if the loader's sizes are known. Or drain_every is not
                positive.
            ModelError: a batch differs from the example in more than the samples.
            RunError: training failed on some worker; no worker hangs, and the pipeline
                cannot be used any more.
        """
        drains = drains_after(drain_every)
        self._check_loader(loader)
        check_last_batch(loader, self._num_parts)
        size = self._settings.accumulate
        batches = recorded_batches(
            self._worker_loader(loader),
            self._recorder,
            self._step,
            "next batch",
            per_step=size,
        )
        steps = map(self._works_of, grouped(batches, size))
        yield from self._driver.train(steps, drains)

    def step(self, batch: Any, *more: Any) -> StepResult:
        """Train one step on one batch `(inputs, targets)`, or on several, to its end.

        Raises:
            DataError: the batch has fewer samples than microbatches.
            ModelError: the batch differs from the example in more than the samples.
            RunError: training failed on some worker; no worker hangs, and the pipeline
                cannot be used any more.
        """
        return self._driver.step(self._works_of((batch, *more)))

    def evaluate(
        self,
        loader: Iterable[Any],
        metrics: Metrics | None = None,
        *,
        use_ema: bool = False,
    ) -> EvaluationResult:
        """Run a loader through the model in evaluation mode, forward only.

        Args:
            loader: yields the same batches on every worker; of any size.
            metrics: `metrics(output, targets)` returns named means over a microbatch's
                samples.
            use_ema: whether to use the averaged weights in place of the trained ones.

        Returns:
            Means over all samples, the same on every worker.

        Raises:
            DataError: the loader is empty.
            ModelError: `metrics` is no function, or does not return named means; or a
                batch differs from the example in more than the samples.
        """
        check_metrics(metrics)
        self._check_loader(loader)
        self._drain()
        with (
            self._using(use_ema),
            self._reported(),
            preserve_generators(self.world.device),
        ):
            return self._evaluator.evaluate(self._worker_loader(loader), metrics)

    def measured(self) -> Timeline:
        """The measured timeline of the last step; every worker must call this.

        If steps overlap, it shows all steps since none was in flight.

        Raises:
            DataError: no step has been trained yet; or too many have overlapped.
        """
        schedule, record = self._driver.last()
        with self._reported():
            return gather_timeline(
                schedule, self.plan.costs, record, self.world, self._layout
            )

    def state_dict(self, *, ema: bool = False) -> dict[str, Tensor]:
        """Weights and buffers by the uncut model's names; every worker must call this.

        Args:
            ema: whether to return the averaged weights in place of the trained ones.

        Returns:
            The whole model's state, the same on every worker.
        """
        self._drain()
        with self._using(ema), self._reported():
            return gather_state(
                self._outline,
                self._executor.runners.values(),
                holders_of(
                    self.plan.schedule.program, dict(enumerate(self.plan.state_names))
                ),
                self.world.device,
            )

    def save(
        self,
        folder: str | Path,
        *,
        data: Json = None,
        background: bool = False,
        keep: int | None = 3,
    ) -> None:
        """Save all that training needs to go on; every worker must call this.

        Args:
            folder: the folder of this run's checkpoints, the same on every worker.
            data: saved too, and returned by `load`: the position in the data. Rank 0's
                is used.
            background: copy everything, and write while training goes on. An error is
                then raised by the next `save`, `load` or `close`.
            keep: how many checkpoints to keep: the newest. None keeps all.

        Raises:
            DataError: `data` is not JSON.
            CheckpointError: it could not be written, or another run saves there. Older
                checkpoints are unchanged, and training may go on.
        """
        self._drain()
        with self._reported():
            self._checkpoints.save(
                Path(folder), self._step, data=data, background=background, keep=keep
            )

    def load(
        self,
        folder: str | Path,
        *,
        step: int | str = "latest",
        allow_previous: bool = False,
    ) -> Any:
        """Resume from a checkpoint as if training had never stopped; on every worker.

        Args:
            folder: the folder that `save` was given.
            step: the checkpoint's step; "latest" is the newest.
            allow_previous: if it is damaged, take the newest whole one before it.

        Returns:
            The `data` that `save` was given.

        Raises:
            CheckpointError: there is none, or it is of another model, or damaged.
                Nothing was changed.
        """
        self._drain()
        with self._reported():
            loaded = self._checkpoints.load(
                Path(folder), step, allow_previous=allow_previous
            )
            self._step = loaded.step
            self._driver.resume_from(loaded.step)
        return loaded.data

    def close(self) -> None:
        """Close the pipeline, when all workers have called this.

        A worker that left earlier would break connections that others still read. A
        background save is complete then, or its error is raised.
        """
        if not self._why_ended:
            self._drain()
            with self._reported():
                self._checkpoints.join()
                self.world.barrier("the end of the pipeline")
            self._why_ended = "it was closed"
        self._stack.close()
        self._checkpoints.finish()

    def _works_of(self, batches: Sequence[Any]) -> list[NetBatches]:
        """The next step's."""
        step_batches = make_step_batches(
            batches, self._step, self._layout, self._counts, self.plan.example
        )
        self._step += 1
        return step_batches

    def _drain(self) -> None:
        """Finish all steps in flight, before weights are read."""
        self._driver.drain()

    def _using(self, ema: bool) -> contextlib.AbstractContextManager[None]:
        return self._executor.averaged() if ema else contextlib.nullcontext()

    def _check_loader(self, loader: Iterable[Any]) -> None:
        with self._reported():
            check_same_length(loader, self.world)

    def _worker_loader(self, loader: Iterable[Any]) -> Iterable[Any]:
        return worker_loader(
            loader, self._executor, self.plan, self._layout, self.world.device
        )
