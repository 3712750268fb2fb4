"""`hocket.Waves`: trains one job in two waves that share a device.

waves = Waves(model, loss, optimizer=lambda p: AdamW(p), sync="wave")
  │ train(loader)    submits the ops of `order.py` to two lanes: threads on a CPU,
  │                  streams on a GPU
  └ gradients        mean or sum over the waves ─▶ one all-reduce over the
                     replicas ─▶ clip ─▶ the wave's optimizer
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor, nn

from hocket.errors import ConfigError
from hocket.model.trace.state import refuse_faults, refuse_no_values
from hocket.options import PrecisionName
from hocket.run.checkpoint.manager import CheckpointManager
from hocket.run.cluster.group import GroupMaker
from hocket.run.cluster.layout import make_layout, replica_group
from hocket.run.cluster.world import World
from hocket.run.data.batch import digest, kept
from hocket.run.data.loader import check_last_batch, check_same_length, recorded_batches
from hocket.run.data.loss import LossFunction
from hocket.run.data.metrics import EvaluationResult, Metrics, check_metrics
from hocket.run.device.open import open_device
from hocket.run.engine.driver import drains_after
from hocket.run.engine.same_everywhere import refuse_differences
from hocket.run.engine.worker_run import WorkerRun
from hocket.run.stage.seed import preserve_generators
from hocket.run.weights.settings import (
    OptimizerFactory,
    SchedulerFactory,
    TrainingConfig,
)
from hocket.run.weights.updater import averaged
from hocket.sharing.waves.order import NUM_WAVES, SyncName
from hocket.sharing.waves.player import (
    WavePlayer,
    WaveSettings,
    checked_microbatches,
    refuse_precision,
)
from hocket.sharing.waves.saved import SavedWaves
from hocket.sharing.waves.wave import Wave, WaveResult, WaveStep, copy_of, result_of

_TICK: Final = 0


class Waves(WorkerRun):
    """Trains a model in two waves: one's forward runs beside the other's backward.

    Each worker of the job has both waves and takes its part of every batch. Waves
    overlap while `train` goes through a loader.

        sync="wave"    batch `n` goes to wave `n % 2`, which has a copy of the weights,
                       the buffers and the optimizer. Its update applies the mean of its
                       own gradient and that of the batch before, which the other wave
                       computed with its copy: gradients are stale by one batch. The
                       learning rate of update `n` is that of step `n` of the schedule
        sync="exact"   the microbatches of a batch alternate between the waves, which
                       have one copy of the weights, and one update reads the gradients
                       of all: the plain loop over the same microbatches

    Args:
        model: any module; moved to the worker's device, and trained in place. It is
            tick's copy.
        loss: `loss(output, targets)` returns the mean over a microbatch's samples, as
            for `Pipeline`.
        optimizer: makes the optimizer of one copy, given all its parameters; called
            once per copy.
        sync: "wave" or "exact".
        num_microbatches: the parts of each batch on each replica; 2 if sync is "exact",
            which takes even numbers, and 1 if it is "wave", when not given.
        scheduler: makes the learning-rate schedule of an optimizer.
        clip_norm: the largest norm of what an update applies: with "wave" that is the
            mean over two batches and all replicas, not the gradient of one wave.
        precision: the type that forwards compute in: "bfloat16" and "float16" use
            autocast, the latter with a loss scale; with "wave" there is no "float16".
        ema_decay: keep averaged weights too, which each batch moves by `1 - ema_decay`
            of the way to the new ones; with "wave" those of either copy, whose updates
            count as two batches.
        seed: the seed of random numbers in forwards; each microbatch draws its own.
        timeout_s: after which a wait for another lane or worker ends in an error.
        run_dir: the folder for reports of failures.
        world: the job, if it is joined already.

    Raises:
        ConfigError: an option is not valid.
        ModelError: the model has nothing to train, or cannot be copied.
        SchemaError: workers have different models or settings.

    Source: Wang et al., "Wavelet" (MLSys'21), figure 9.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        *,
        optimizer: OptimizerFactory,
        sync: SyncName = "wave",
        num_microbatches: int | None = None,
        scheduler: SchedulerFactory | None = None,
        clip_norm: float | None = None,
        precision: PrecisionName = "float32",
        ema_decay: float | None = None,
        seed: int = 0,
        timeout_s: float | None = None,
        run_dir: str | Path | None = None,
        world: World | None = None,
    ) -> None:
        settings = TrainingConfig(
            optimizer=optimizer,
            scheduler=scheduler,
            clip_norm=clip_norm,
            precision=precision,
            ema_decay=ema_decay,
        )
        self._num_microbatches = checked_microbatches(sync, num_microbatches)
        refuse_precision(sync, settings.compute_precision)
        refuse_faults([model])
        refuse_no_values(model, "the model", "load them first")
        settings.compute_precision.check_types([model])
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError("the model has no parameters that train")
        super().__init__("run in waves", world, timeout_s, run_dir)
        self.sync, self.seed = sync, seed
        with self._reported():
            self._layout = make_layout(self.world, self.world.world_size)
            model.to(self.world.device)
            twin = copy_of(model)
            refuse_differences(
                self.world,
                {
                    "settings": f"{settings.text}, {sync}, {seed}, "
                    f"{self._num_microbatches}",
                    "weights": f"{digest((model.state_dict(), 0)):08x}",
                },
            )
            tock_settings = settings if sync == "wave" else None
            self.waves = Wave(model, settings), Wave(twin, tock_settings)
            if sync == "wave":
                self.waves[1].skip_batch()
            groups = self._stack.enter_context(
                GroupMaker(self.world.rank, self._timeout_s, self._recorder.wait)
            )
            group = replica_group(self._layout, groups)
            device = open_device(
                self.world.device, NUM_WAVES, timeout_s=self._timeout_s
            )
            self._stack.callback(device.close)
            self._device = device
            self._player = WavePlayer(
                self.waves,
                loss,
                WaveSettings(
                    sync,
                    self._num_microbatches,
                    clip_norm,
                    seed,
                    self._timeout_s,
                    settings.compute_precision,
                ),
                device,
                self._layout,
                group,
            )
            self._checkpoints = CheckpointManager(
                SavedWaves(self._player, self.world, self._store),
                self._recorder,
                timeout_s=self._timeout_s,
            )
            self._stack.callback(self._checkpoints.release)
        self._under_way: deque[WaveStep] = deque()

    @property
    def num_steps(self) -> int:
        """Batches that were trained or begun, over the whole run."""
        return self._step

    def train(
        self,
        loader: Iterable[Any],
        *,
        drain_every: int | Callable[[int], bool] | None = None,
    ) -> Iterator[WaveResult]:
        """Train one step on each batch of a loader.

        With "wave" it reads up to two batches ahead of the result that it yields.

        Args:
            loader: yields the same batches `(inputs, targets)` on every worker.
            drain_every: finish all waves under way after so many steps, or after those
                for whose numbers a function returns True, before their results are
                yielded: what is saved or evaluated at these has exactly their updates.

        Raises:
            DataError: a batch is no pair, or has fewer samples than microbatches.
            NonFiniteError: a loss or a gradient is not finite.
            RunError: training failed on some worker.
        """
        drains = drains_after(drain_every)
        with self._together("train()"):
            check_same_length(loader, self.world)
            check_last_batch(
                loader, self._num_microbatches * self._layout.num_pipelines
            )
        self.synchronize()
        self._under_way.clear()  # of a loop that was left: their results were not read
        begin_s = perf_counter()
        batches = iter(loader)
        is_over = False
        while not is_over:
            together: list[Any] = []
            while not is_over and not self._is_round(len(together), drains):
                batch = next(batches, _END)
                is_over = batch is _END
                together += [] if is_over else [kept(batch)]
            for result in self._play(together, drains, is_over=is_over):
                now_s = perf_counter()
                yield replace(result, seconds=now_s - begin_s)
                begin_s = now_s

    def step(self, batch: Any) -> WaveResult:
        """Train one step on one batch, to its end: nothing overlaps it with "wave".

        Raises:
            As `train`.
        """
        begin_s = perf_counter()
        *_, result = self._play([batch], lambda _: True, is_over=True)
        return replace(result, seconds=perf_counter() - begin_s)

    def synchronize(self) -> None:
        """Wait until all waves are done: from then on, the model may be read."""
        with self._reported():
            self._device.join()
            self._device.synchronize(self._timeout_s)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scale's state, for float16; equal on all workers."""
        return self._player.scaler

    def evaluate(
        self,
        loader: Iterable[Any],
        metrics: Metrics | None = None,
        *,
        use_ema: bool = False,
    ) -> EvaluationResult:
        """Evaluate tick's copy, after all steps under way; every worker must call this.

        Each worker takes its part of each batch, with the first one's buffers.

        Args:
            loader: yields the same batches on every worker; of any size.
            metrics: `metrics(output, targets)` returns named means over a part's
                samples.
            use_ema: whether to use the averaged weights in place of the trained ones.

        Returns:
            Means over all samples, the same on every worker.

        Raises:
            ConfigError: there are no averaged weights.
            DataError: the loader is empty; nothing was changed.
            MetricsError: `metrics` failed on a worker; every worker raises it, and
                nothing was changed.
            ModelError: `metrics` is no function.
            SchemaError: the workers did not evaluate on the same batches.
        """
        check_metrics(metrics)
        self.synchronize()
        with (
            self._averaged(is_used=use_ema),
            self._together("evaluate()"),
            preserve_generators(self.world.device),
        ):
            sums = self._player.evaluate(
                recorded_batches(loader, self._recorder, self._step, "eval batch"),
                metrics,
                self.world,
            )
        return sums.result()

    def state_dict(self, *, ema: bool = False) -> dict[str, Tensor]:
        """Return copies of tick's weights and buffers, after all steps under way.

        Args:
            ema: whether to return the averaged weights in place of the trained ones.

        Raises:
            ConfigError: there are no averaged weights.
        """
        self.synchronize()
        with self._averaged(is_used=ema):
            return {
                name: x.detach().clone()
                for name, x in self.waves[_TICK].module.state_dict().items()
            }

    def _averaged(self, *, is_used: bool) -> AbstractContextManager[None]:
        """Put tick's averaged weights in the place of the trained ones for a while."""
        updater = self.waves[_TICK].updater
        assert updater is not None
        return averaged([updater], "waves", is_used=is_used)

    def save(
        self, folder: str | Path, *, data: Any = None, keep: int | None = 3
    ) -> None:
        """Save all that training needs to go on, of both waves; every worker calls.

        Args:
            folder: the folder of this run's checkpoints, the same on every worker.
            data: JSON that `load` returns: the position in the data.
            keep: how many checkpoints to keep: the newest. None keeps all.

        Raises:
            CheckpointError: it could not be written; older ones are unchanged.
            DataError: `data` is not JSON.
        """
        self.synchronize()
        with self._together("save()"):
            self._checkpoints.save(
                Path(folder), self._step, data=data, background=False, keep=keep
            )

    def load(self, folder: str | Path, *, step: int | str = "latest") -> Any:
        """Resume as if training had never stopped; every worker must call this.

        Args:
            folder: the folder that `save` was given.
            step: the checkpoint's step; "latest" is the newest.

        Returns:
            The `data` that `save` was given.

        Raises:
            CheckpointError: there is none, or it is of another model, other settings
                or another number of workers, or damaged. Nothing was changed.
        """
        self.synchronize()
        with self._together("load()"):
            loaded = self._checkpoints.load(Path(folder), step, allow_previous=False)
            self._step = loaded.step
            self._under_way.clear()
            return loaded.data

    def _drain(self) -> None:
        """Finish all waves under way."""
        self.synchronize()

    def _is_round(self, num: int, drains: Callable[[int], bool]) -> bool:
        """Return whether so many batches are submitted together.

        A lane of a CPU is the calling thread: tock's ops are queued before tick's run.
        """
        last = self._step + num - 1
        return num > 0 and (
            self.sync == "exact" or last % NUM_WAVES == 1 or drains(last)
        )

    def _play(
        self, batches: list[Any], drains: Callable[[int], bool], *, is_over: bool
    ) -> Iterator[WaveResult]:
        """Submit steps, and yield the results of those that are due."""
        with self._reported(), preserve_generators(self.world.device):
            steps = [self._begun(batch) for batch in batches]
            self._player.submit(steps, is_idle=not self._under_way)
        self._under_way += steps
        last = self._step - 1
        keeps = not (is_over or self.sync == "exact" or drains(last))
        while len(self._under_way) > keeps:
            step = self._under_way.popleft()
            with self._reported():
                self._player.finish(step)
                wave = step.number % NUM_WAVES if self.sync == "wave" else 0
                result = result_of(step, wave)
            yield result

    def _begun(self, batch: Any) -> WaveStep:
        """Cut the batch of the next step, and count it."""
        found = self._player.begin(self._step, batch)
        self._step += 1
        return found


_END: Final[Any] = object()
