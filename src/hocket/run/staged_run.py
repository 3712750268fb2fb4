"""What a pipeline plays on one worker: made once, and cut again when layers freeze.

PipelineConfig ─▶ assembly.py ─▶ plan, executor, layout ─▶ the next step
                                    ▲                          │ due?
                                    └──── freezing, a load ────┘

Finds out when one worker's loader ends before another's, whose lengths are unknown.

    rank 0   batch 10 │ 11 │ no more: posts "12", and waits until all have posted
    rank 1   batch 10 │ 11 │ 12: its step waits for rank 0 ...
                             └ a thread reads "12", and posts "13"

Rank 0 then raises an error that names both counts; rank 1 notices that rank 0 is gone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any, Final

import torch.distributed as dist
from torch import nn

from hocket.errors import DataError, ModelError, WaitError
from hocket.freeze.forecast import StepTimes, Stretch, rest_s
from hocket.model.capture.attribute_writes import preserve_attributes
from hocket.model.stages.outline import Outline
from hocket.model.trace.example import Form
from hocket.model.trace.observe import preserve_state
from hocket.model.trace.state import State
from hocket.run.assembly import assemble, memory_explained
from hocket.run.checkpoint.load import given_weights
from hocket.run.checkpoint.manager import CheckpointManager
from hocket.run.checkpoint.saved_run import SavedRun
from hocket.run.cluster.layout import make_layout, tp_size_of
from hocket.run.cluster.store.poll import poll
from hocket.run.data.batch import apart, on_device
from hocket.run.data.loader import check_iterable, check_same_length
from hocket.run.data.reading_processes import begun
from hocket.run.data.reads import ReadSpec
from hocket.run.data.sample_loader import PartLoader
from hocket.run.data.step_batch import (
    NetBatches,
    first_of,
    make_net_batches,
    with_changes,
)
from hocket.run.diagnostics.startup import StartupProgress, StartupReporter
from hocket.run.engine.driver import Driver
from hocket.run.engine.evaluate import Evaluator
from hocket.run.engine.executor import PlayedLayout
from hocket.run.engine.gather import packed_extra
from hocket.run.engine.plan import Plan
from hocket.run.engine.programs.part_sizes import part_sizes
from hocket.run.engine.refusals import refuse_input_gradients
from hocket.run.engine.sync.step_result import StepResult
from hocket.run.engine.worker_run import WorkerRun
from hocket.run.fill.make import make_filling
from hocket.run.nets.followed import CACHED
from hocket.run.stage.loss_checks.trial import (
    hooks_kept_apart,
    loss_name,
    loss_part,
    restored_attributes,
)
from hocket.run.tune.config import PipelineConfig


def _outline(config: PipelineConfig, plan: Plan) -> Outline:
    """Return the model's outline, with what else is trained: teachers, a loss."""
    teachers = {name: teacher.net for name, teacher in config.teachers.items()}
    beside = {n: net for n, net in teachers.items() if config.teachers[n].moves}
    name = loss_name([config.model], teachers)
    if any(x.startswith(f"{name}.") for names in plan.state_names for x in names):
        beside[name] = loss_part(config.loss, [config.model, *teachers.values()])
    others = {name: Outline.of(net) for name, net in beside.items()}
    return Outline.of(config.model).joined(others)


class StagedRun(WorkerRun):
    """The stages of a run, and all that follows them when they are cut again.

    Args:
        config: what the user asked for.

    Raises:
        HocketError: see `hocket.Pipeline`.
    """

    def __init__(self, config: PipelineConfig) -> None:
        super().__init__("pipeline", config.world, config.timeout_s, config.run_dir)
        self._accumulate, self._num_parts = config.accumulate, config.num_parts
        world, recorder, timeout_s = self.world, self._recorder, self._timeout_s
        with self._reported():
            config.refuse_no_values()
            given = given_weights(config.model, config.weights)
            config = replace(config, weights=given)
            example = apart(on_device(config.example, world.device))
            layout = self._layout = make_layout(
                world,
                config.num_replicas,
                config.num_shards,
                tp_size_of(config.model, world),
            )
            with StartupReporter(config.progress, world.rank == 0) as reporter:
                others = config.optimizer, config.scheduler
                with (
                    restored_attributes(config.loss, others),
                    hooks_kept_apart(config.model),
                    memory_explained(world),
                ):
                    plan, executor, self._freezing, self._followed = assemble(
                        replace(config, progress=reporter, example=example),
                        self._opened,
                        layout,
                    )
                if config.fill is not None:
                    reporter(StartupProgress("measuring the net of fill"))
                self.filling = make_filling(
                    config.fill,
                    plan,
                    executor.player,
                    world,
                    layout,
                    config.memory_bytes,
                )
                self._stack.callback(self.filling.close)
            if given is not None:
                given.forget()
            self.plan = plan
            self._transition_s = 0.0  # of the change of layout before this step
            self._times = StepTimes()
            self._untimed: deque[tuple[StepResult, float]] = deque()
            self._beside_s = 0.0  # of this step
            self._ahead: list[Stretch] = []  # until the plan changes
            self._ahead_until = 0  # the steps of the run that it is about
            self._cache = None if self._freezing is None else self._freezing.cache
            if self._cache is not None:
                self._stack.callback(self._cache.close)
            self._sizes_of = part_sizes(plan.schedule.program)
            self._outline = _outline(config, plan)
            self._form = plan.example.form
            self._trains = bool(self._outline.state.trained)
            beside = [*config.teachers, loss_name([config.model], config.teachers)]
            self._followers = tuple(f"{name}." for name in beside)
            packed_extra(self._outline.modules)  # refuses what cannot be saved
            self._executor = executor
            self._driver = Driver(executor, self._playing, self._forget)
            played = PlayedLayout(plan, executor)
            self._saved = SavedRun(self._outline, played, world, self._freezing)
            self._checkpoints = CheckpointManager(
                self._saved, recorder, timeout_s=timeout_s
            )
            self._stack.callback(self._checkpoints.release)
            self._batch_counts = BatchCounts(
                self._store, world.rank, world.world_size, timeout_s
            )
            self._evaluator = self._make_evaluator()
            if any(x.trainable and x.delay for x in plan.schedule.program.stages):
                runners = executor.runners.values()
                whole = (part for x in runners for part in x.module.whole)
                stages = nn.ModuleList([*(x.module for x in runners), *whole])
                with preserve_attributes(stages), preserve_state(State.of(stages)):
                    self._evaluator.collect([config.example])  # checks old weights

    def _next_batches(self, batches: Sequence[Any]) -> list[NetBatches]:
        """Return the batches of the next step, and count it."""
        begin_s = perf_counter()
        if not self._trains:  # not in the last stage alone: others would wait for it
            raise ModelError(
                "the loss does not depend on any weight: all of the model's parameters "
                "are frozen (requires_grad=False), so nothing would be trained"
            )
        self._follow()
        self._freeze_if_due(batches[0])
        program = self.plan.schedule.program
        found = make_net_batches(
            batches,
            self._step,
            self._layout,
            program.nets,
            self.plan.example,
            self.world.device,
            self._sizes_of,
        )
        reads, names = self._executor.reads, self.plan.example.names
        for nets in found:
            refuse_input_gradients(program, reads, nets, names)
        forms = [first_of(nets).step.form for nets in found]
        are_other = [self._follow_form(form) for form in (*forms, *forms[:-1])]
        if any(are_other[len(forms) :]):
            raise ModelError(
                f"the batches of step {self._step} need different graphs, each for its "
                "numbers, texts or lengths: accumulate batches that are alike in these"
            )
        for nets in found:
            for net in self._followed:
                parts = nets[program.net_of(net.stages[0]).name].everywhere
                net.check_samples({part.num_samples for part in parts}, self._step)
        self.filling.begin(len(batches))
        self._step += 1
        self._beside_s = perf_counter() - begin_s - self._transition_s
        return with_changes(found, self._executor.changes)

    def _follow(self, *, evaluates: bool = False) -> None:
        """Follow the loop's changes, as far as frozen layers let it."""
        self._follow_changes(
            CACHED if self._cache is not None else "",
            evaluates=evaluates,
            may_freeze=self._freezing is not None,
        )

    def _follow_form(self, form: Form) -> bool:
        """Let all nets run with a batch of this form; the example's where it is empty.

        Returns:
            Whether a net has another graph now.

        Raises:
            ModelError: a net's code is for the example's form.
        """
        form = Form(*(x or own for x, own in zip(form, self._form, strict=True)))
        is_other = False
        for net in self._followed:
            if not net.runs_with(form):
                self._driver.finish()
                if net.follow_form(form, self._step):
                    is_other = True
                    with self._reported():
                        net.cut_again(self._executor.runners)
        return is_other

    def _freeze_if_due(self, batch: Any) -> None:
        """Freeze layers before the next step, and change the layout with them."""
        freezing = self._freezing
        if freezing is None or not freezing.is_due(self._step):
            return
        self._driver.finish()
        begin_s = perf_counter()
        with self._reported():
            now = self._saved.played
            played = freezing.follow(self._step, now, batch)
            if played.plan is not self.plan:
                self._end_stretch(is_change=played.executor is not now.executor)
            self.plan = played.plan  # its frozen part may be read from now on
            if played.executor is not now.executor:
                self._checkpoints.finish()
                self._saved.go_on_with(played)
                self._go_on_with(played)
                self._attach_cache()
                self._transition_s = perf_counter() - begin_s

    @property
    def _stretch(self) -> Stretch:
        """What is played now."""
        step_s = self.plan.predicted.step_s
        return Stretch(self._step, self._layout.num_pipelines, step_s)

    def seconds_left(self, num_steps: int) -> float | None:
        """Predict how long the steps take that are left of a run, by this worker.

        Steps are simulated in the layouts to come, where layers freeze by a policy that
        measures nothing; another one is taken to freeze no more. They are predicted to
        be slower than simulated by the factor that was measured so far. Waits for data,
        evaluations and checkpoints do not count.

        Args:
            num_steps: the steps of the whole run.

        Returns:
            Seconds; None before the first step.
        """
        self._take_times()
        pace = self._times.pace(self._stretch)
        if pace is None:
            return None
        if num_steps != self._ahead_until:
            self._ahead.clear()
        if not self._ahead:
            self._ahead_until = num_steps
            self._ahead.append(self._stretch)
            if self._freezing is not None:
                played = self._saved.played
                self._ahead[:] = self._freezing.ahead(self._step, num_steps, played)
        return rest_s(self._ahead, self._step, num_steps, pace)

    def _take_times(self, *, num_left: int = 0) -> None:
        """Note how long steps took, but those of the last results."""
        while len(self._untimed) > num_left:
            result, beside_s = self._untimed.popleft()
            self._times.add(result.seconds, beside_s)

    def _end_stretch(self, *, is_change: bool = True) -> None:
        """Keep the pace of what was played, before another layout or step is."""
        self._take_times()
        self._times.end(self._stretch, is_change=is_change)
        self._ahead.clear()

    def _go_on_with(self, played: PlayedLayout) -> None:
        """Play another layout, or the same, from the next step on."""
        if played.executor is self._executor:
            return
        self.plan, self._executor = played.plan, played.executor
        self._layout = played.layout
        for net in self._followed:
            net.cut_at(self.plan.boundaries, self.plan.schedule.program.flows)
        self._stack.callback(played.executor.sync.give_up)
        self._sizes_of = part_sizes(played.plan.schedule.program)
        self._driver.go_on_with(played.executor)
        self._evaluator = self._make_evaluator()

    def _attach_cache(self) -> None:
        """Begin to cache what frozen layers compute in the layout that is played."""
        if self._cache is not None:
            self._cache.attach(self.plan, self._executor, self._layout)

    def _described(self, result: StepResult) -> StepResult:
        """Return a result with the layout that played it, and what is frozen."""
        self.filling.deliver()
        self._untimed.append((result, self._beside_s))
        self._take_times(num_left=1)  # a device may not have ended this step yet
        layout = self._saved.played.shape
        if self._freezing is None:
            return replace(result, layout=layout)
        # Only float16 skips: to ask would wait for the step.
        skipped = self._executor.scale is not None and result.skipped
        self._freezing.after_step(self._executor, result.step, skipped=skipped)
        transition_s, self._transition_s = self._transition_s, 0.0
        return replace(
            result,
            layout=layout,
            num_frozen=self._freezing.num_frozen,
            transition_s=transition_s,
            cache_hits=0 if self._cache is None else self._cache.take_hits(),
            cache_s=0.0 if self._cache is None else self._cache.take_seconds(),
        )

    def _make_evaluator(self) -> Evaluator:
        return Evaluator(self._executor, self.plan, self._follow_form)

    def _check_loader(self, loader: Iterable[Any], call: str) -> bool:
        check_iterable(loader)
        with self._together(call):
            return check_same_length(loader, self.world)

    def _counted(
        self, batches: Iterable[Any], at_most_s: float | None = None
    ) -> Iterator[Any]:
        """Yield a loader's batches, of which each worker must have as many."""
        yield from self._batch_counts.counted(batches)
        with self._reported():
            self._batch_counts.agree(at_most_s)

    def _worker_loader(self, loader: Iterable[Any]) -> Iterable[Any]:
        """Return what this worker iterates over: its part of a PartLoader, or all."""
        is_whole = self._freezing is not None  # its part changes with the layout
        if is_whole or not isinstance(loader, PartLoader):
            return loader
        runners, layout = self._executor.runners.values(), self._layout
        program = self.plan.schedule.program
        net = program.nets[-1]
        reads_all = net.batch_loss or program.whole_batch_flows
        num_replicas = 1 if reads_all else layout.num_pipelines
        num_parts = layout.num_pipelines // num_replicas
        reads = ReadSpec(
            inputs=any(runner.module.batch_inputs for runner in runners),
            targets=any(x.loss.function or x.loss.batch_function for x in runners),
            num_microbatches=net.num_microbatches * num_parts,
            num_replicas=num_replicas,
            replica=layout.pipeline % num_replicas,
            device=self.world.device,
        )
        return loader.parts(reads)


_PERIOD_S: Final = 0.25


class BatchCounts:
    """Counts one worker's batches, and compares the count with the others'.

    Args:
        store: a store with a prefix of this run's own.
        rank: this worker's.
        num_workers: the number of all workers.
        timeout_s: how long to wait for another worker's last batch.
    """

    def __init__(
        self, store: dist.Store, rank: int, num_workers: int, timeout_s: float
    ) -> None:
        self._store = store
        self._rank = rank
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._loop = 0
        self._num_read = 0

    def counted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield a loader's batches; every worker must call this."""
        self._loop += 1
        self._num_read = 0
        is_over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(is_over,), daemon=True)
        thread.start()
        try:
            for batch in begun(batches):
                self._num_read += 1
                yield batch
        finally:
            is_over.set()
            thread.join()
        counts = f"{self._rank} {self._num_read}"
        self._store.set(self._key("ended"), counts)
        self._store.set(self._key(f"of rank {self._rank}"), counts)
        self._store.add(self._key("total"), self._num_read)
        self._store.add(self._key("num_ended"), 1)

    def agree(self, at_most_s: float | None = None) -> None:
        """Wait until all workers' batches have ended; called when this worker's have.

        Args:
            at_most_s: return after so long, whether or not they have: where steps
                overlap, another worker's last batches may wait for steps of this one
                that have not ended.

        Raises:
            DataError: another worker has more batches; names both counts.
            WaitError: another worker's batches did not end within the timeout.
        """
        more, num_ended = self._key("more"), self._key("num_ended")

        def is_known() -> bool:
            return self._store.add(
                num_ended, 0
            ) == self._num_workers or self._store.check([more])

        if not poll(is_known, self._timeout_s if at_most_s is None else at_most_s):
            if at_most_s is not None:
                return
            raise WaitError(
                f"the batches of rank {self._rank} ended after {self._num_read}, and "
                f"after {self._timeout_s:g} s not all other workers' had: another rank "
                "is gone, stuck, or slower than the timeout allows"
            )
        if self._store.check([more]):
            self._refuse(more)
        if self._store.add(self._key("total"), 0) != self._num_read * self._num_workers:
            for rank in range(self._num_workers):
                self._refuse(self._key(f"of rank {rank}"))

    def _refuse(self, key: str) -> None:
        rank, num_read = self._store.get(key).decode().split()
        if int(num_read) != self._num_read:
            raise DataError(
                f"the loader of rank {self._rank} ended after {self._num_read} "
                f"batches, that of rank {rank} has yielded {num_read}: give every "
                "worker the same data (the pipeline hands each worker its part)"
            )

    def _watch(self, is_over: threading.Event) -> None:
        """Post this worker's count where another's batches ended before."""
        with suppress(WaitError):  # a worker is gone, which the main thread finds out
            while not is_over.wait(_PERIOD_S):
                if not self._store.check([self._key("ended")]):
                    continue
                _, num_read = self._store.get(self._key("ended")).decode().split()
                if self._num_read > int(num_read):
                    self._store.set(self._key("more"), f"{self._rank} {self._num_read}")
                    return

    def _key(self, what: str) -> str:
        return f"batches {self._loop} {what}"
