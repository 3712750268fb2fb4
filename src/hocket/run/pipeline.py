"""The public Pipeline: trains and evaluates a user's model in parallel."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator, Sized
from math import ceil
from pathlib import Path
from typing import Any, Final

from torch import nn

from hocket.core.timelines.timeline import Timeline
from hocket.draw.quantity import counted
from hocket.errors import ConfigError, ModelError
from hocket.run.cluster.reporting import reports_to_torchrun
from hocket.run.cluster.stop import StoppedBySignal
from hocket.run.data.loader import check_last_batch, recorded_batches
from hocket.run.data.metrics import EvaluationResult, Metrics, check_metrics
from hocket.run.data.step_batch import grouped
from hocket.run.diagnostics.job_folder import Json
from hocket.run.elastic.cache.training_order import refuse_batch
from hocket.run.engine.driver import drains_after
from hocket.run.engine.gather import gather_state, holders_of
from hocket.run.engine.sync.step_result import StepResult
from hocket.run.engine.timeline import gather_timeline
from hocket.run.stage.seed import preserve_generators
from hocket.run.staged_run import StagedRun
from hocket.run.tune.config import PipelineConfig
from hocket.signatures import constructor_takes_fields_of, values_of

# For other workers' last batches, before the steps under way are ended.
_GRACE_S: Final = 2.0


class Pipeline(StagedRun):
    """Trains a model in stages on several workers.

    Every worker makes the same Pipeline from the same model, and iterates over the same
    batches; each worker takes its part. The pipeline joins the torchrun job it runs in,
    or the workers that `hocket.launch` started; alone, it has one device.

    Args:
        config: not an argument of its own: the fields of `hocket.PipelineConfig` are
            the arguments, `Pipeline(model, loss, optimizer=..., example=..., ...)`;
            `__init__` describes each.

    Attributes:
        filling: how far `fill` has come, and its simulated timeline.

    Raises:
        ModelError: the model cannot be captured or cut as asked.
        ShapeError: the schedule's constraints refuse the numbers.
        ParseError: the schedule's file cannot be read.
        ScheduleError: the given schedule must not run; gives everything wrong with it.
        DataError: the example is no batch, or smaller than the microbatches.
        FitError: a device has too little memory even if all its stages recompute, or
            for any order that is made for it; names the smallest that works.
        ConfigError: a setting that makes no sense.
        PlanError: no schedule has the given name.

    Warns:
        RepeatingBubbleWarning: "v-min" or "v-half" waits in every microbatch, with the
            measured times; warned on the main worker.
        LowMomentumWarning: a teacher with a delay follows the student fast; says how
            much the delay changes; warned on the main worker.
        CacheWarning: a cache keeps less than it was asked to; warned on the worker that
            has the frozen layers.
        FreezingWarning: the first `step()`, where a policy is asked at the ends of
            epochs; warned on the main worker.
    """

    @reports_to_torchrun()
    @constructor_takes_fields_of(PipelineConfig, device="each worker takes its own")
    def __init__(self, config: PipelineConfig) -> None:
        super().__init__(config)
        self._before_end: Callable[[], object] | None = None

    @classmethod
    def from_config(cls, config: PipelineConfig) -> Pipeline:
        """Make a pipeline of a configuration, such as `dataclasses.replace` makes."""
        return cls(**values_of(PipelineConfig, config))

    def __str__(self) -> str:
        """Describe the plan that is played, and how far training has come."""
        layout = self._saved.played.shape
        names = "devices x replicas" + " x shards" * (self._layout.num_shards > 1)
        steps = counted(self._step, "step")
        return f"{self.plan}\n{layout} ({names}), {steps} trained"

    def __repr__(self) -> str:
        """Return one line."""
        name = self.plan.schedule_name or "a given order"
        layout = self._saved.played.shape
        return f"<hocket.Pipeline {name} {layout}, step {self._step}>"

    def _repr_html_(self) -> str:
        from hocket.draw.html.page import html_card

        return html_card(self.predicted, title="predicted", text=str(self))

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

    @property
    def num_parameters(self) -> tuple[int, int]:
        """The parameters of the model that train, and those that are frozen now."""
        return self._outline.num_parameters(self.plan.frozen_names)

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
                positive; or, with `cache`, the loader does not name its samples, or
                they vary.
            ModelError: a batch differs from the example in more than the samples.
            RunError: training failed on some worker; no worker hangs, and the pipeline
                cannot be used any more.
        """
        drains = drains_after(drain_every)
        is_sized = self._check_loader(loader, "train()")
        check_last_batch(loader, self._num_parts)
        size = self._accumulate
        if self._freezing is not None:
            num_batches = len(loader) if isinstance(loader, Sized) else 0
            self._freezing.begin_epoch(self._step, ceil(num_batches / size))
        overlaps = self._executor.plan.overlaps
        batches = recorded_batches(
            self._worker_loader(loader)
            if self._cache is None
            else self._cache.batches(loader),
            self._recorder,
            self._step,
            "next batch",
            per_step=size,
            waits_s=self._driver.data_waits_s,
            reads_ahead=overlaps or size > 1,
        )
        if not is_sized:
            batches = self._counted(batches, _GRACE_S if overlaps else None)
        steps = self._until_asked(map(self._next_batches, grouped(batches, size)))
        stop = self.world.stop
        for result in self._driver.train(steps, lambda n: stop.is_agreed or drains(n)):
            yield self._described(result)
        self._end_if_asked()
        if self._freezing is not None:
            self._freezing.epoch_ended = True
        if overlaps and not is_sized:
            with self._reported("train()"):
                self._batch_counts.agree()

    @contextlib.contextmanager
    def on_sigterm(self, save: Callable[[], object]) -> Iterator[None]:
        """Let SIGTERM end the run after a step, and save; around the loop.

        Without it, SIGTERM ends each worker at once. In the block, all workers end
        after the same step, whether the signal came to all of them or to one: the loop
        has had the step's result, `save` is called on every worker, the pipeline is
        closed, and `train()`, or the next `step()`, raises SystemExit(143). A signal
        that no step follows in the block ends the worker at the end of it.

        Args:
            save: saves what the run goes on from, such as by `save()`.

        Raises:
            ConfigError: this process has a SIGTERM handler of its own; or this is not
                its main thread.
        """
        with self.world.stop.awaited():
            self._before_end = save
            yield

    def _until_asked(self, steps: Iterator[Any]) -> Iterator[Any]:
        """Yield steps' batches, until all workers are to end."""
        while True:
            self.world.stop.post()
            if self.world.stop.is_agreed:
                return
            try:
                yield next(steps)
            except StopIteration:
                return

    def _end_if_asked(self) -> None:
        """Save and end, where all workers do; the last step's result was seen."""
        stop = self.world.stop
        if stop.is_agreed and self._before_end is not None:
            self._before_end()
            self.close()
            stop.is_asked = stop.is_agreed = False  # it is answered
            raise StoppedBySignal(signal.SIGTERM)
        stop.post()

    def step(self, batch: Any, *more: Any) -> StepResult:
        """Train one step on one batch `(inputs, targets)`, or on several, to its end.

        Raises:
            DataError: the batch has fewer samples than microbatches; or there is a
                cache, which must know the samples.
            ModelError: the batch differs from the example in more than the samples.
            RunError: training failed on some worker; no worker hangs, and the pipeline
                cannot be used any more.
        """
        if self._cache is not None:
            refuse_batch()
        self._end_if_asked()
        if self._freezing is not None:
            self._freezing.warn_of_no_epoch()
        return self._described(self._driver.step(self._next_batches((batch, *more))))

    def evaluate(
        self,
        loader: Iterable[Any],
        metrics: Metrics | None = None,
        *,
        use_ema: bool = False,
    ) -> EvaluationResult:
        """Run a loader through the model in evaluation mode, forward only.

        Teachers run, too, with their newest weights: the loss is that of training.

        Args:
            loader: yields the same batches on every worker; of any size.
            metrics: `metrics(output, targets)` returns named means over a microbatch's
                samples.
            use_ema: whether to use the averaged weights in place of the trained ones.

        Returns:
            Means over all samples, the same on every worker.

        Raises:
            DataError: the loader is empty, or no loader; nothing was changed.
            MetricsError: `metrics` failed on a worker, or does not return named means;
                every worker raises it, and nothing was changed.
            ModelError: `metrics` is no function; or a batch differs from the example in
                more than the samples.
        """
        check_metrics(metrics)
        with self._evaluated(loader, "evaluate", use_ema=use_ema) as batches:
            sums = self._evaluator.evaluate(batches, metrics)
        return sums.result()

    def outputs(self, loader: Iterable[Any], *, use_ema: bool = False) -> Any:
        """Return the model's outputs in evaluation mode, such as features for probes.

        Every worker must call this, and gets all of them.

        Args:
            loader: yields the same batches `(inputs, targets)` on every worker; of any
                size. Targets are not looked at.
            use_ema: whether to use the averaged weights in place of the trained ones.

        Returns:
            What the model returns, its tensors joined along dimension 0 over all
            samples, in the loader's order; on the CPU, the same on every worker.

        Raises:
            DataError: the loader is empty.
            ModelError: outputs cannot be joined along dimension 0, or hold more than
                tensors, numbers, text and None; or a batch differs from the example in
                more than the samples.
        """
        with self._evaluated(loader, "outputs", use_ema=use_ema) as batches:
            return self._evaluator.outputs(batches)

    @contextlib.contextmanager
    def _evaluated(
        self, loader: Iterable[Any], call: str, *, use_ema: bool
    ) -> Iterator[Iterable[Any]]:
        """Finish all steps, and yield the batches to evaluate."""
        call = f"{call}({'use_ema=True' if use_ema else ''})"
        is_sized = self._check_loader(loader, call)
        self._drain()
        self._follow(evaluates=True)
        with (
            self._executor.averaged(is_used=use_ema),
            self._reported(call),
            preserve_generators(self.world.device),
            contextlib.ExitStack() as stack,
        ):
            for net in self._followed:
                stack.enter_context(net.evaluating())
            batches = self._worker_loader(loader)
            yield batches if is_sized else self._counted(batches)
        self._forget()

    def measured(self) -> Timeline:
        """The measured timeline of the last step; every worker must call this.

        If steps overlap, it shows all steps since none was in flight.

        Raises:
            DataError: no step has been trained yet; or too many have overlapped.
        """
        schedule, record, waits_s = self._driver.last()
        with self._together("measured()"):
            costs, context = self.plan.costs, self._executor.context
            timeline = gather_timeline(schedule, costs, record, context, waits_s)
        if self._driver.last_result is not None:
            self._driver.last_result.recorded[:] = [timeline]
        return timeline

    def state_dict(self, *, ema: bool = False) -> dict[str, Any]:
        """The uncut model's state by its own names; every worker must call this.

        Weights, buffers and extra state; hooks of the model's modules are called.
        Those of a teacher that moves have its name and a dot before theirs; a frozen
        teacher has none here.

        Args:
            ema: whether to return the averaged weights in place of the trained ones.

        Returns:
            The whole model's state, the same on every worker.

        Raises:
            ModelError: an extra state holds more than tensors, numbers, text and None.
        """
        self._drain()
        call = f"state_dict({'ema=True' if ema else ''})"
        with (
            self._executor.averaged(is_used=ema),
            self._together(call),
            self._executor.whole_weights(),
        ):
            state = gather_state(
                self._outline,
                self._executor.runners.values(),
                holders_of(
                    self.plan.schedule.program,
                    dict(enumerate(self.plan.state_names)),
                    self._layout.tp_size,
                ),
                self.world,
                self._layout.pipeline + self._layout.tp_rank,
            )
            return self._outline.modules.after_save(state)

    def gather_into(self, model: nn.Module, *, ema: bool = False) -> None:
        """Copy the whole model's state into a model; every worker must call this.

        Weights, buffers and extra state are loaded as `model.load_state_dict` does:
        into the tensors that the model has, on any device. Training goes on as before.

        Args:
            model: the model that was given to the pipeline, of which each worker has
                trained its own stages alone; or any other of the same names.
            ema: whether to copy the averaged weights in place of the trained ones; not
                into the model that is trained.

        Raises:
            ConfigError: averaged weights would replace those that are trained.
            ModelError: the model has other names or shapes; or see `state_dict`.
        """
        state = self.state_dict(ema=ema)
        runners = self._executor.runners.values()
        trained = {x.data_ptr() for one in runners for x in one.module.parameters()}
        if ema and not trained.isdisjoint(x.data_ptr() for x in model.parameters()):
            raise ConfigError(
                "gather_into(ema=True) would replace the weights that are trained by "
                "their averages: give another model, such as a copy made before"
            )
        own = {
            name: x for name, x in state.items() if not name.startswith(self._followers)
        }
        if self._executor.shards is not None:
            self._executor.shards.allocate(model)
        try:
            model.load_state_dict(own)
        except RuntimeError as error:
            raise ModelError(
                f"gather_into needs a model of the same names: {error}"
            ) from error

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
        self.filling.deliver()
        with self._together("save()"):
            self._checkpoints.save(
                Path(folder),
                self._step,
                data=data,
                num_filled=self.filling.num_samples,
                background=background,
                keep=keep,
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
        self._follow()  # before modules get the weights of another cut
        with self._together("load()"):
            loaded = self._checkpoints.load(
                Path(folder), step, allow_previous=allow_previous
            )
            self._end_stretch()
            self._step = loaded.step
            self.filling.resume_from(loaded.num_filled)
            self._go_on_with(self._saved.played)
            self._driver.resume_from(loaded.step)
            self._attach_cache()
        return loaded.data

    def close(self) -> None:
        """Close the pipeline, when all workers have called this.

        A worker that left earlier would break connections that others still read. A
        background save is complete then, or its error is raised.
        """
        super().close()
        self._checkpoints.finish()

    def _finish_writing(self) -> None:
        self._checkpoints.join()
