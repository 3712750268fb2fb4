"""Train all nets of a program on several workers, in the order of a schedule.

    run = ProgramRun(schedule, {"teacher": a, "student": b}, {"student": loss},
                     {"student": adamw}, batch, cut_at={"student": ["2"]})
    for result in run.train(loader): ...

Every run equals `hocket.emulate` of the same program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from hocket.core.schedule import Schedule
from hocket.errors import ConfigError, ShapeError
from hocket.passes.playable_order import playable_order
from hocket.run.cluster.layout import Layout, make_layout
from hocket.run.cluster.world import World
from hocket.run.comm.transports import TransportName
from hocket.run.data.batch import apart, kept
from hocket.run.data.step_batch import NetBatches, make_step_batches, with_changes
from hocket.run.engine.driver import Driver, drains_after
from hocket.run.engine.gather import gather_state
from hocket.run.engine.lanes.play_plan import plan_to_play
from hocket.run.engine.lanes.point_to_point import PointToPoint
from hocket.run.engine.make_executor import make_executor
from hocket.run.engine.plan import short_hash
from hocket.run.engine.programs.by_net import ByNet, NetArguments
from hocket.run.engine.programs.net_setup import nets_of_batch
from hocket.run.engine.programs.nets import ProgramNets
from hocket.run.engine.refusals import refuse_settings
from hocket.run.engine.same_everywhere import (
    refuse_differences,
    refuse_different_losses,
)
from hocket.run.engine.sync.step_result import StepResult
from hocket.run.engine.worker_context import open_context
from hocket.run.engine.worker_run import WorkerRun
from hocket.run.weights.momentum import FollowerUpdate
from hocket.run.weights.settings import OptimizerFactory, SchedulerFactory


class ProgramRun(WorkerRun):
    """Trains the nets of a program on the workers of a job.

    Every worker makes the same run from the same models, and iterates over the same
    batches. Where an argument is a mapping by net, a program of one net takes the bare
    object. Nets that are copies of one another share the arguments of the first.

    Args:
        schedule: an order of one step, or of several with a body that repeats.
        models: the model of each net.
        losses: the loss of each net that ends in one.
        optimizers: the optimizer of each trained net, as for `Pipeline`; a `Momentum`
            or a `CopyEvery` for each net that follows another one.
        example: a batch as training will give them: a pair `(inputs, targets)` for all
            nets, or a mapping of pairs by net.
        cut_at: the modules with which the stages of a net but the first begin.
        schedulers: as for `Pipeline`.
        clip_norm: the most that the gradients of one gate may measure together.
        seed: for random numbers in forwards.
        transport: as for `Pipeline`: what carries messages between workers.
        timeout_s: after which any wait for another worker ends in an error.
        run_dir: where reports of failures go.
        sanitize: whether to look for accesses of two lanes of a device that no path of
            events orders; takes time.
        world: the job, where it is joined already.

    Raises:
        ConfigError: a net lacks a model, a loss or an optimizer, or has one too many;
            or `sanitize`, and every device has one lane.
        ShapeError: there are other numbers of workers or stages than the program has.
        ModelError: a model cannot be cut so; or a flow leads to where no output of
            another net can go.
        ScheduleError: the schedule must not run; says everything wrong with it.
        SchemaError: the workers have different models, schedules or settings.
        DataError: the example is no batch, or smaller than the microbatches.
    """

    def __init__(
        self,
        schedule: Schedule,
        models: ByNet[nn.Module],
        losses: ByNet[Callable[..., Any]],
        optimizers: ByNet[OptimizerFactory | FollowerUpdate],
        example: Any,
        *,
        cut_at: Sequence[str] | Mapping[str, Sequence[str]] = (),
        schedulers: ByNet[SchedulerFactory] | None = None,
        clip_norm: float | None = None,
        seed: int = 0,
        transport: TransportName = "auto",
        timeout_s: float | None = None,
        run_dir: str | Path | None = None,
        sanitize: bool = False,
        world: World | None = None,
    ) -> None:
        super().__init__("run", world, timeout_s, run_dir)
        with self._reported():
            self.schedule = playable_order(schedule)
            program = self.schedule.program
            self._layout = _layout(self.world, self.schedule)
            self._nets = ProgramNets(
                program,
                NetArguments.of(
                    program,
                    models,
                    losses,
                    optimizers,
                    cut_at=cut_at,
                    schedulers=schedulers,
                    clip_norm=clip_norm,
                ),
                apart(example),
            )
            digests = {"schedule": short_hash(str(self.schedule)), "seed": str(seed)}
            refuse_differences(self.world, digests | self._nets.digests)
            refuse_different_losses(self.world, self._nets.losses)
            settings = self._nets.settings
            refuse_settings(settings, self.schedule)
            context = open_context(
                transport,
                self._opened,
                self._layout,
                self.schedule,
                clips=clip_norm is not None,
                sanitize=sanitize,
            )
            plan = plan_to_play(self.schedule, clips=clip_norm is not None)
            executor = make_executor(
                plan,
                self._nets.setups,
                PointToPoint(plan, context),
                seed=seed,
            )
            self._executor = replace(executor, follows=False)
            self._nets.forget_modules()
            self._stack.callback(self._executor.sync.give_up)
            self._followed = self._nets.followed
        self._driver = Driver(self._executor, self._playing, self._forget)

    def train(
        self,
        batches: Iterable[Any],
        *,
        drain_every: int | Callable[[int], bool] | None = None,
    ) -> Iterator[StepResult]:
        """Train one step on each batch.

        Args:
            batches: the same on every worker; each is a pair `(inputs, targets)` for
                all nets, or a mapping of pairs by net.
            drain_every: as for `Pipeline.train`.

        Raises:
            DataError: a batch has fewer samples than microbatches.
            RunError: something went wrong; the run is of no more use.
        """
        drains = drains_after(drain_every)
        if self._executor.plan.overlaps:
            batches = map(kept, batches)
        yield from self._driver.train(map(self._next, batches), drains)

    def step(self, batch: Any) -> StepResult:
        """Train one step on one batch, to its end.

        Raises:
            DataError: the batch has fewer samples than microbatches.
            RunError: something went wrong; the run is of no more use.
        """
        return self._driver.step(self._next(batch))

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the weights and buffers of each net, by the uncut models' names.

        Every worker must call this, and gets all. Nets that are copies are one.
        """
        self._drain()
        program, runners = self.schedule.program, self._executor.runners
        with self._together("state_dict()"):
            return {
                net: gather_state(
                    outline,
                    [x for n, x in runners.items() if program.stages[n].net == net],
                    self._nets.holders[net],
                    self.world,
                    self._layout.pipeline,
                )
                for net, outline in self._nets.outlines.items()
            }

    def _next(self, batch: Any) -> list[NetBatches]:
        """Follow what the loop has changed, and cut the batch of the next step."""
        self._follow_changes(self._nets.cannot_follow)
        program, by_net = self.schedule.program, isinstance(batch, Mapping)
        parts: dict[str, NetBatches] = {}
        for net in self._nets.outlines:
            counts = {
                x.name: x.num_microbatches
                for x in program.nets
                if x.name in nets_of_batch(program, net)
            }
            (made,) = make_step_batches(
                [batch[net] if by_net else batch],
                self._step,
                self._layout,
                counts,
                self._nets.forms[net],
                self.world.device,
                self._nets.sizes_of[net],
            )
            parts[net] = made
        self._step += 1
        every = {net: x for made in parts.values() for net, x in made.items()}
        return with_changes([every], self._executor.changes)


def _layout(world: World, schedule: Schedule) -> Layout:
    program = schedule.program
    if program.num_shards > 1:
        raise ConfigError(
            f"the program has num_shards={program.num_shards}, and a program's run has "
            "no sharded stages: take hocket.Pipeline(..., num_shards="
            f"{program.num_shards}) for a program of one net, or num_replicas="
            f"{program.num_pipelines} in place of shards"
        )
    layout = make_layout(world, program.num_replicas)
    if layout.num_devices != program.num_devices:
        raise ShapeError(
            f"there are {world.world_size} workers, and the program has "
            f"{program.num_devices} devices in each of {program.num_replicas} "
            f"replicas: start {program.num_devices * program.num_replicas}"
        )
    return layout
