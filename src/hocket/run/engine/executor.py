"""What one worker needs to play its lanes: stages, updaters, messages, gates.

Detects parameters that are trained under way and were not before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hocket.core.layout import WorkerLayout
from hocket.errors import ModelError
from hocket.run.cluster.group import WorkerGroup
from hocket.run.cluster.layout import Layout
from hocket.run.data.step_batch import Batches, NetBatches, first_of
from hocket.run.engine.lanes.op_times import OpTimes
from hocket.run.engine.lanes.play_plan import PlayPlan, Portion
from hocket.run.engine.lanes.player import Player
from hocket.run.engine.lanes.wiring import Wiring
from hocket.run.engine.plan import Plan
from hocket.run.engine.refusals import InputReads, refuse_hooks
from hocket.run.engine.sync.step_sync import StepSync
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.stage.precision import LossScale
from hocket.run.stage.runner import StageRunner
from hocket.run.weights.sharded.shards import Shards
from hocket.run.weights.stale_ties.worker_ties import WorkerTies
from hocket.run.weights.updater import Updater, averaged


@dataclass
class Executor:
    """One worker's stages, and everything that serves them.

    Args:
        plan: what is played.
        runners: this device's stages, by number.
        updaters: their updaters, by stage.
        scale: the loss scale, where the precision needs one.
        context: this worker's connections, and where the weights are.
        player: plays the lanes.
        sync: losses, norms and gates.
        ties: the weights that stages of different delays share.
        wiring: which values go along each flow.
        replicas: this worker and its replicas; None where there is one replica.
        reads: what each stage of the program reads of a batch.
        shards: the weights of this worker's stages, where they are sharded.
        follows: whether what the loop freezes is followed, and compared with others.

    Attributes:
        trained: detects parameters that are trained and were not at construction.
        changes: a digest of what the loop has changed in the models so far; workers
            compare it.
    """

    plan: PlayPlan
    runners: dict[int, StageRunner]
    updaters: dict[int, Updater]
    scale: LossScale | None
    context: WorkerContext
    player: Player
    sync: StepSync
    ties: WorkerTies
    wiring: Wiring
    replicas: WorkerGroup | None
    reads: Sequence[InputReads]
    shards: Shards | None = None
    follows: bool = True
    trained: TrainableCheck = field(init=False)
    changes: int = field(init=False, default=0)
    _num_hooks: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        """Note which parameters are trained."""
        is_alone = len(self.plan.program.nets) == 1
        parameters, fixed = dict[str, nn.Parameter](), set[str]()
        for runner in self.runners.values():
            prefix = "" if is_alone else f"{runner.net}."
            named = {f"{prefix}{name}": x for name, x in runner.parameters.items()}
            parameters |= named
            is_fixed = runner.versions is not None or not self.follows
            fixed.update(named if is_fixed else ())
        self.trained = TrainableCheck(parameters, fixed)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scale's state, where there is one; equal on all workers."""
        return None if self.scale is None else self.scale.scaler

    def play(
        self,
        portion: Portion,
        first: int,
        batches: Batches,
        begun: Sequence[NetBatches],
    ) -> OpTimes:
        """Play a portion.

        Args:
            portion: the portion.
            first: the step that its step 0 is.
            batches: all batches under way, by step and net.
            begun: those of them that begin here, in order.

        Raises:
            RunError: something went wrong.
        """
        steps = (first_of(nets).step.number for nets in batches.values())
        step = min(steps, default=0)
        self.trained.check(step)
        if self._num_hooks != RemovableHandle.next_id:  # each hook has a number
            self._num_hooks = RemovableHandle.next_id
            modules = {number: x.module for number, x in self.runners.items()}
            refuse_hooks(self.plan.program, modules, f"before step {step}, ")
        for runner in self.runners.values():
            runner.train(mode=runner.training)
        for nets in begun:
            self.sync.begin(nets)
            self.player.begin(nets)
        if self.scale is not None:
            batches = _scaled(batches, self.scale)
        return self.player.play(portion, first, batches)

    def resume_from(self, number: int) -> None:
        """Set the number of the next step, after another state was loaded.

        Raises:
            WaitError: another worker did not come.
        """
        for runner in self.runners.values():
            if runner.versions is not None:
                runner.versions.resume_from(number)
        self.ties.resume_from(number)
        self.sync.resume_from(number)

    def stored(self, parameter: Tensor) -> Tensor:
        """Return what this worker keeps of a parameter: itself, its shard or master."""
        for updater in self.updaters.values():
            parameter = updater.masters.stored(parameter)
        return parameter if self.shards is None else self.shards.shard_of(parameter)

    def whole_weights(self) -> AbstractContextManager[None]:
        """Let this worker have the whole weights of its stages for a while.

        Where they are sharded, all workers must call this.
        """
        return nullcontext() if self.shards is None else self.shards.whole()

    @contextmanager
    def averaged(self, *, is_used: bool = True) -> Iterator[None]:
        """Put the averaged weights in the place of the trained ones for a while.

        Args:
            is_used: False to leave the trained ones.

        Raises:
            ConfigError: there are none.
        """
        with (
            averaged(self.updaters.values(), "pipeline", is_used=is_used),
            self.ties.averaged() if is_used else nullcontext(),
        ):
            yield


@dataclass(frozen=True, slots=True)
class PlayedLayout:
    """What the workers play in one layout.

    Args:
        plan: what was decided.
        executor: this worker's.
    """

    plan: Plan
    executor: Executor

    @property
    def layout(self) -> Layout:
        """The ranks by device and replica."""
        return self.executor.context.layout

    @property
    def shape(self) -> str:
        """Devices x replicas, such as "4x2"; x shards where there are any: "4x2x2"."""
        now = self.layout
        return str(WorkerLayout(now.num_devices, now.num_replicas, now.num_shards))


def _scaled(batches: Batches, scale: LossScale) -> Batches:
    """Multiply the losses of batches by the loss scale of their steps."""

    def scaled(nets: NetBatches) -> NetBatches:
        read = cache(lambda: scale.value)  # a GPU's is read once in a step
        return {net: replace(work, read_scale=read) for net, work in nets.items()}

    return {step: scaled(nets) for step, nets in batches.items()}


class TrainableCheck:
    """Detects parameters that are frozen or unfrozen where nothing can follow that.

    A pipeline's construction fixes which gradients are sent, reduced and kept, and
    which weights have versions. What is frozen later gets no gradient, and may be
    trained again. The check takes tenths of a microsecond per parameter.

    Args:
        parameters: the parameters of this worker's stages, by the uncut model's names.
        fixed: those of them that may not be frozen, such as those that old versions
            are kept of.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], fixed: Collection[str] = ()
    ) -> None:
        self._names = tuple(parameters)
        self._parameters = tuple(parameters.values())
        self._fixed = frozenset(fixed)
        self._first = self._seen = self._now()

    def check(self, step: int) -> None:
        """Check all parameters; called at each step.

        Args:
            step: the step's number, for the error.

        Raises:
            ModelError: names the first that is trained and was not, or that is frozen
                and may not be.
        """
        now = self._now()
        if now == self._seen:
            return
        for name, first, trained in zip(self._names, self._first, now, strict=True):
            if first == trained or (first and name not in self._fixed):
                continue
            way_out = (
                "save and make another pipeline of the model as it is to be trained now"
                if first
                else "make the pipeline while all is trained that ever will be, and "
                "freeze it before the first step"
            )
            raise ModelError(
                f"requires_grad of {name} was {first} when the pipeline was made, and "
                f"is {trained} at step {step}: what is sent back and updated, and "
                f"which old weights are kept, was fixed then. Restore it; or {way_out}"
            )
        self._seen = now

    def _now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]
