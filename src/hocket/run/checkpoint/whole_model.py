"""The model that one process trains whole, and what checkpoints hold of it.

A pipeline can load these checkpoints, and a process that of a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.errors import DamagedError
from hocket.model.stages.outline import Outline
from hocket.model.trace.state import State, overwrite
from hocket.run.checkpoint.check_states import check_kind, check_updates
from hocket.run.checkpoint.collect import Tensors, WorkerShare, record_of, updates_of
from hocket.run.checkpoint.format.manifest import RunRecord, Section
from hocket.run.checkpoint.format.opened import (
    OpenedCheckpoint,
    TensorLocation,
    open_checkpoint,
    read_tensors,
)
from hocket.run.checkpoint.load import Candidates, Loaded, first_readable
from hocket.run.checkpoint.match import check_setup, match_names
from hocket.run.checkpoint.random_state import (
    check_random_state,
    random_state,
    set_random_state,
)
from hocket.run.checkpoint.regroup import RegroupedUpdates
from hocket.run.checkpoint.restore import (
    Key,
    placed,
    put_averages,
    put_updates,
    state_places,
    updates_in,
)
from hocket.run.cluster.store.store_exchange import StoreExchange
from hocket.run.cluster.world import World
from hocket.run.engine.gather import packed_extra
from hocket.run.weights.updater import Updater

_STAGE: Final = 0  # the only one


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint that was read and matches the model.

    Args:
        opened: the checkpoint.
        names: maps the model's names to those in the checkpoint.
        updates: the optimizer's state.
        tensors: by section and name in the checkpoint.
    """

    opened: OpenedCheckpoint
    names: Mapping[str, str]
    updates: Mapping[int, RegroupedUpdates]
    tensors: Mapping[Key, Tensor]


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
        self._updater, self._scaler, self._seed = updater, scaler, seed
        state = State.of(module)
        self._tensors = {
            first: state.tensors[first]
            for first, names in state.names.items()
            if not state.persistent.isdisjoint(names)
        }

    @property
    def store(self) -> dist.Store:
        """See `Saved`."""
        return self.world.store

    def record(self) -> RunRecord:
        """See `Saved`."""
        base = record_of(self.outline, 1, has_averages=self._updater.ema is not None)
        scaler = None if self._scaler is None else self._scaler.state_dict()
        return replace(base, seed=self._seed, scaler=scaler)

    def share(self) -> WorkerShare:
        """See `Saved`."""
        kept: dict[str, Tensor] = {}
        updates = updates_of(_STAGE, self._updater, self._tensors.keys(), kept)
        averages = self._updater.ema or {}
        tensors: Tensors = {
            Section.WEIGHTS: {name: x.detach() for name, x in self._tensors.items()},
            Section.AVERAGED: {name: x.detach() for name, x in averages.items()},
            Section.OPTIMIZER: kept,
        }
        random = random_state(self.world.device)
        extra = packed_extra(self.outline.modules)
        return WorkerShare(0, 0, tensors, (updates,), random, extra)

    def load(self, candidates: Candidates, exchange: StoreExchange) -> Loaded:
        """See `Saved`."""
        path, found = first_readable(candidates, exchange, self._read)
        saved, device = found.opened.manifest.run, self.world.device
        for name, tensor in self._tensors.items():
            value = found.tensors[Section.WEIGHTS, found.names[name]]
            overwrite(tensor, value)
        self.outline.modules.load(found.opened.extra)
        for new in found.updates.values():
            put_averages(self._updater, found.names, found.tensors)
            put_updates(self._updater, new, found.tensors)
            if self._scaler is not None:
                self._scaler.load_state_dict(saved.scaler)
            set_random_state(found.opened.parts[0].random, device)
        return Loaded(path, saved.step, saved.data)

    def _read(self, path: Path) -> _Found | str:
        """Read a checkpoint and check it; return a text if it is damaged.

        Raises:
            CheckpointError: it does not fit.
        """
        try:
            opened = open_checkpoint(path)
            weights = opened.locations(Section.WEIGHTS)
            names = match_names(opened, self.outline)
            places: dict[Key, TensorLocation] = {
                (Section.WEIGHTS, names[name]): weights[names[name]]
                for name in self._tensors
            }
            saved, updaters = opened.manifest.run, {_STAGE: self._updater}
            check_setup(path, saved, self.record())
            updates = updates_in(opened, names, updaters)
            places |= state_places(opened, names, updates, updaters)
            tensors = read_tensors(places)
            for new in updates.values():
                check_updates(self._updater, new, partial(placed, tensors, None))
                if self._scaler is not None:
                    own = self._scaler.state_dict()
                    check_kind("the gradient scaler", saved.scaler, own)
                check_random_state(opened.parts[0].random, self.world.device)
        except DamagedError as error:
            return str(error)
        return _Found(opened, names, updates, tensors)
