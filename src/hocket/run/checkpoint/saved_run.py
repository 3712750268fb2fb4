"""The run that checkpoints hold: a pipeline, or a model that one process trains whole.

Either can load what the other has saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.errors import CheckpointError, DamagedError
from hocket.model.stages.outline import Outline
from hocket.model.trace.state import State
from hocket.run.checkpoint.collect import (
    Tensors,
    WorkerShare,
    collect,
    describe,
    random_state,
    record_of,
    updates_of,
)
from hocket.run.checkpoint.format.manifest import FreezingRecord, RunRecord, Section
from hocket.run.checkpoint.format.opened import (
    OpenedCheckpoint,
    check_tensors,
    open_checkpoint,
    read_tensors,
)
from hocket.run.checkpoint.load import Candidates, Loaded, first_readable, read_together
from hocket.run.checkpoint.restore import (
    Key,
    LiveState,
    RestorePlan,
    check_fits,
    check_states,
    make_restore_plan,
    plan_of_whole,
    restore,
    restore_stages,
    watched_tensors,
)
from hocket.run.cluster.store.store_exchange import StoreExchange
from hocket.run.cluster.world import World
from hocket.run.engine.executor import Executor, PlayedLayout
from hocket.run.engine.gather import packed_extra
from hocket.run.weights.updater import Updater


class LayerFreezing(Protocol):
    """What freezes layers and changes the layout, as checkpoints see it."""

    def record(self, played: PlayedLayout) -> FreezingRecord:
        """Return the frozen layers and the policy's state."""

    def watched(self, executor: Executor) -> Mapping[str, Tensor]:
        """Return what the policy measured of this worker's weights, by name."""

    def enter(
        self, saved: FreezingRecord | None, now: PlayedLayout, step: int
    ) -> PlayedLayout:
        """Cut the net as it was saved; every worker must call this.

        Raises:
            CheckpointError: the checkpoint's layers cannot be frozen here; raised on
                all workers, and nothing is changed.
        """

    def leave(self, before: PlayedLayout, after: PlayedLayout) -> None:
        """Undo `enter`."""

    def resume(
        self,
        saved: FreezingRecord | None,
        played: PlayedLayout,
        watched: Mapping[str, Tensor],
    ) -> None:
        """Restore the policy's state, once the weights are restored."""


@dataclass(eq=False)
class SavedRun:
    """What one worker saves and loads.

    Args:
        outline: the uncut model's outline.
        played: what the workers play.
        world: the job.
        freezing: freezes layers while training runs; None if nothing does.

    Attributes:
        played: what the workers play; a load may change it.
    """

    outline: Outline
    played: PlayedLayout
    world: World
    freezing: LayerFreezing | None

    def __post_init__(self) -> None:
        self._base: RunRecord | None = None

    def go_on_with(self, played: PlayedLayout) -> None:
        """Save and load the stages of another layout from now on."""
        self.played, self._base = played, None

    @property
    def store(self) -> dist.Store:
        """See `Saved`."""
        return self.played.executor.context.store

    def load(self, candidates: Candidates, exchange: StoreExchange) -> Loaded:
        """See `Saved`; the run is played in the saved layout afterwards.

        Args:
            candidates: the checkpoints that may be loaded.
            exchange: exchanges values between the workers.

        Raises:
            CheckpointError: there is none, it is of another model, or damaged; nothing
                was changed.
        """
        read = partial(self._read, exchange)
        path, (needs, tensors) = first_readable(candidates, exchange, read)
        restore_stages(needs, tensors, self.played.executor)
        self.outline.modules.load(needs.opened.extra)
        saved = needs.opened.manifest.run
        if self.freezing is not None:
            watched = watched_tensors(needs, tensors)
            self.freezing.resume(saved.freezing, self.played, watched)
        return Loaded(path, saved.step, saved.data, saved.num_filled)

    def _read(
        self, exchange: StoreExchange, path: Path
    ) -> tuple[RestorePlan, dict[Key, Tensor]] | str:
        """Read what this worker needs, in the layout in which it was saved.

        Returns:
            What was read, and `played` is the layout for it; or the damage if any
            worker finds some.

        Raises:
            CheckpointError: it does not fit, on some worker.
        """
        if self.freezing is None:
            return self._read_into_layout(path, exchange)

        def open_here() -> OpenedCheckpoint:
            opened = open_checkpoint(path)
            check_fits(opened, self.outline, self.record())
            return opened

        opened = read_together(exchange, f"open {path.name}", open_here)
        if isinstance(opened, str):
            return opened
        before, saved = self.played, opened.manifest.run
        self.go_on_with(self.freezing.enter(saved.freezing, before, saved.step))
        try:
            found = self._read_into_layout(path, exchange)
        except CheckpointError:
            self._return_to(before)
            raise
        if isinstance(found, str):
            self._return_to(before)
        return found

    def _return_to(self, before: PlayedLayout) -> None:
        after = self.played
        self.go_on_with(before)
        if after is not before and self.freezing is not None:
            self.freezing.leave(before, after)

    def _read_into_layout(
        self, path: Path, exchange: StoreExchange
    ) -> tuple[RestorePlan, dict[Key, Tensor]] | str:
        """Read what this worker needs; return the damage if any worker finds some.

        Raises:
            CheckpointError: it does not fit, on some worker.
        """
        played = self.played

        def read() -> tuple[RestorePlan, dict[Key, Tensor]]:
            needs = make_restore_plan(
                open_checkpoint(path),
                self.outline,
                played.executor,
                played.plan,
                played.layout,
                self.record(),
            )
            if exchange.rank == 0:
                check_tensors(needs.spare)
            tensors = read_tensors(needs.locations)
            check_states(needs, tensors, LiveState.of(played.executor))
            return needs, tensors

        return read_together(exchange, f"read {path.name}", read)

    def record(self) -> RunRecord:
        """Return the run's record, without the step and the user's data."""
        if self._base is None:
            executor, layout = self.played.executor, self.played.layout
            self._base = describe(self.outline, executor, layout)
        executor, freezing = self.played.executor, None
        state = None if executor.scaler is None else executor.scaler.state_dict()
        runner = next(iter(executor.runners.values()))
        if self.freezing is not None:
            freezing = self.freezing.record(self.played)
        return replace(self._base, seed=runner.seed, scaler=state, freezing=freezing)

    def share(self) -> WorkerShare:
        """Return what this worker writes, with live tensors.

        Raises:
            CheckpointError: it cannot be written.
        """
        watched: Mapping[str, Tensor] = {}
        if self.freezing is not None:
            watched = self.freezing.watched(self.played.executor)
        return collect(self.played, self.world, self.outline.modules, watched)


_STAGE: Final = 0  # the only one


class WholeModel:
    """A model, its optimizer, and the random numbers of its process.

    Args:
        module: the model.
        updater: updates all of its weights.
        scaler: scales the loss, for float16.
        seed: the seed of the run.
        world: a world of this process alone.
    """

    def __init__(
        self,
        module: nn.Module,
        updater: Updater,
        scaler: torch.amp.GradScaler | None,
        seed: int,
        world: World,
    ) -> None:
        self.outline, self.world = Outline.of(module), world
        self._updater, self._seed, state = updater, seed, State.of(module)
        tensors = {
            first: state.tensors[first]
            for first, names in state.names.items()
            if not state.persistent.isdisjoint(names)
        }
        self._live = LiveState(tensors, {_STAGE: updater}, scaler, world.device)

    @property
    def store(self) -> dist.Store:
        """See `Saved`."""
        return self.world.store

    def record(self) -> RunRecord:
        """See `Saved`."""
        base = record_of(self.outline, 1, has_averages=self._updater.ema is not None)
        scaler = self._live.scaler
        state = None if scaler is None else scaler.state_dict()
        return replace(base, seed=self._seed, scaler=state)

    def share(self) -> WorkerShare:
        """See `Saved`."""
        kept: dict[str, Tensor] = {}
        own, averages = self._live.tensors, self._updater.ema or {}
        updates = updates_of(_STAGE, self._updater, own.keys(), kept)
        tensors: Tensors = {
            Section.WEIGHTS: {name: x.detach() for name, x in own.items()},
            Section.AVERAGED: {name: x.detach() for name, x in averages.items()},
            Section.OPTIMIZER: kept,
        }
        random = random_state(self.world.device)
        extra = packed_extra(self.outline.modules)
        return WorkerShare(0, 0, tensors, (updates,), random, extra)

    def load(self, candidates: Candidates, exchange: StoreExchange) -> Loaded:
        """See `Saved`."""
        path, (needs, tensors) = first_readable(candidates, exchange, self._read)
        restore(needs, tensors, self._live)
        self.outline.modules.load(needs.opened.extra)
        saved = needs.opened.manifest.run
        return Loaded(path, saved.step, saved.data)

    def _read(self, path: Path) -> tuple[RestorePlan, dict[Key, Tensor]] | str:
        """Read a checkpoint and check it; return a text if it is damaged.

        Raises:
            CheckpointError: it does not fit.
        """
        try:
            opened = open_checkpoint(path)
            needs = plan_of_whole(opened, self.outline, self._live, self.record())
            tensors = read_tensors(needs.locations)
            check_states(needs, tensors, self._live)
        except DamagedError as error:
            return str(error)
        return needs, tensors
