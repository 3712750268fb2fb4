"""What one worker needs to play its lane: stages, and what serves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from hocket.errors import RecipeError
from hocket.run.comm.transport import Transport
from hocket.run.data.step_batch import Work
from hocket.run.engine.flush_free_sync import StreamEnds
from hocket.run.engine.results import Results
from hocket.run.engine.step_sync import StepEnds
from hocket.run.engine.stream_worker import Portion, StreamWorker
from hocket.run.engine.worker import Record, Worker
from hocket.run.stage.precision import LossScale
from hocket.run.stage.runner import StageRunner
from hocket.run.stage.trainable_check import SameTrained
from hocket.run.weights.gradient_status import Judgement
from hocket.run.weights.stale_ties.loans import Loans
from hocket.run.weights.updater import Updater


@dataclass
class Crew:
    """One worker's stages and what serves them.

    Args:
        runners: this device's stages by number.
        updaters: likewise.
        results: the losses of a step, for everyone.
        scale: of the loss, where it needs one.
        transport: carries all messages.
        store: with a prefix of this pipeline's own.
        device: where the weights are.

    Attributes:
        trained: that the same parameters are, as when it was put together.
    """

    runners: dict[int, StageRunner]
    updaters: dict[int, Updater]
    results: Results
    scale: LossScale | None
    transport: Transport
    store: dist.Store
    device: torch.device
    trained: SameTrained = field(init=False)

    def __post_init__(self) -> None:
        """Note which parameters are trained."""
        runners = self.runners.values()
        self.trained = SameTrained(
            {name: p for runner in runners for name, p in runner.parameters.items()}
        )

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scale's state, where there is one; equal on all workers."""
        return None if self.scale is None else self.scale.scaler

    def to_train(self) -> None:
        """Have all stages in training mode."""
        for runner in self.runners.values():
            runner.train(mode=True)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averaged weights in the place of the trained ones for a while.

        Raises:
            RecipeError: there are none.
        """
        if any(updater.ema is None for updater in self.updaters.values()):
            raise RecipeError(
                "there are no averaged weights: make the pipeline with ema_decay=0.999 "
                "or another decay"
            )
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for updater in self.updaters.values():
            updater.swap()


@dataclass
class StepCrew(Crew):
    """One that ends each step before the next begins.

    Args:
        ends: what happens in a step besides its ops.
        worker: plays the lane.
    """

    ends: StepEnds
    worker: Worker

    @property
    def loss_scale(self) -> float:
        """What the next step multiplies its loss by."""
        return 1.0 if self.scale is None else self.scale.value

    @property
    def judgement(self) -> Judgement:
        """What the last step's gradients were like, all together."""
        return self.ends.judgement

    def train(self, work: Work) -> Record:
        """Play one batch of a step; the worker's record of it."""
        self.trained.check(work.step.number)
        self.to_train()
        self.ends.begin(work)
        return self.worker.play(replace(work, loss_scale=self.loss_scale))


@dataclass
class StreamCrew(Crew):
    """One that has several steps in flight.

    Args:
        ends: what happens in a step besides its ops.
        worker: plays the lane.
        loans: the weights that stages of different delays share.
    """

    ends: StreamEnds
    worker: StreamWorker
    loans: Loans

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """See `Crew.averaged`; also of what another worker updates."""
        with super().averaged(), self.loans.averaged():
            yield

    def go_on_from(self, number: int) -> None:
        """The next step is of this number, after another state was loaded.

        Raises:
            WaitError: another worker did not come.
        """
        for runner in self.runners.values():
            if runner.versions is not None:
                runner.versions.go_on_from(number)
        self.loans.go_on_from(number)

    def play(
        self,
        portion: Portion,
        first: int,
        works: Mapping[int, Work],
        begun: Sequence[Work],
    ) -> Record:
        """Play a portion: see `StreamWorker.play_portion`."""
        self.trained.check(first)
        self.to_train()
        for work in begun:
            self.ends.begin(work)
        return self.worker.play_portion(portion, first, works, begun)
