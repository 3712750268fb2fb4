"""Checkpoints of a run in two waves, in the format of all checkpoints.

weights-0                  tick's: `hocket.checkpoint` reads and exports the weights
wave-0                     tock's weights and buffers, the optimizers' tensors, and
                           the gradients that the next update reads
wave-1, ...                other replicas' part of these gradients, and their
                           buffers (BatchNorm), which differ between replicas
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.errors import CheckpointError, ModelError
from hocket.model.stages.outline import Outline
from hocket.run.checkpoint.collect import (
    Tensors,
    WorkerShare,
    random_state,
    record_of,
    set_random_state,
)
from hocket.run.checkpoint.format.manifest import RunRecord, Section
from hocket.run.checkpoint.format.opened import (
    OpenedCheckpoint,
    TensorLocation,
    open_checkpoint,
    read_tensors,
)
from hocket.run.checkpoint.load import Candidates, Loaded, first_readable, read_together
from hocket.run.checkpoint.match import match_names
from hocket.run.cluster.store.store_exchange import StoreExchange
from hocket.run.cluster.store.values import decode, encode
from hocket.run.cluster.world import World
from hocket.run.weights.updater import Updater
from hocket.sharing.waves.player import WavePlayer
from hocket.sharing.waves.wave import Due, Wave

_NAMES: Final = ("tick", "tock")
_OWN: Final = ("buffers/", "due/")


class SavedWaves:
    """What one worker saves and loads (`Saved`), once all waves are done.

    Args:
        player: plays the run, and has all that is saved of it.
        world: the job.
        store: with a prefix of the run's own.
    """

    def __init__(self, player: WavePlayer, world: World, store: dist.Store) -> None:
        self._player, self.world, self.store = player, world, store
        self.outline = Outline.of(player.waves[0].module)
        if self.outline.modules.extra_names:
            raise ModelError(
                f"{min(self.outline.modules.extra_names)}: two waves train two copies "
                "of the model, and an extra state belongs to one: take hocket.Pipeline"
            )

    def record(self) -> RunRecord:
        """See `Saved`."""
        base = record_of(self.outline, self.world.world_size, has_averages=False)
        waves = encode(_state_of(self._player), "", {})
        return replace(base, seed=self._player.settings.seed, waves=waves)

    def share(self) -> WorkerShare:
        """See `Saved`."""
        player, rank = self._player, self.world.rank
        own = _own_of_replica(player)
        tensors: Tensors = {Section.WAVE: own}
        if not rank:
            tock = player.waves[1:] if player.settings.sync == "wave" else ()
            own |= {f"tock/{k}": x for wave in tock for k, x in wave.state().items()}
            encode(_state_of(player), "", own)
            tensors[Section.WEIGHTS] = player.waves[0].state()
        random = random_state(self.world.device)
        return WorkerShare(rank, rank, tensors, (), random)

    def load(self, candidates: Candidates, exchange: StoreExchange) -> Loaded:
        """See `Saved`."""

        def read(path: Path) -> str | _Found:
            here = partial(_read, path, self.outline, self._player, self.world)
            return read_together(exchange, f"read {path.name}", here)

        path, found = first_readable(candidates, exchange, read)
        record = found.opened.manifest.run
        _restore(found, self._player, self.world)
        self._player.resume(_due_of(found, self._player, self.world))
        return Loaded(path, record.step, record.data)


@dataclass(frozen=True, slots=True)
class _Found:
    """What was read of a checkpoint.

    Args:
        opened: the checkpoint.
        record: the states that `encode` wrote.
        tensors: by name, as they were written.
        weights: tick's state by name.
    """

    opened: OpenedCheckpoint
    record: dict[str, Any]
    tensors: dict[str, Tensor]
    weights: dict[str, Tensor]


def _copies(
    player: WavePlayer,
) -> Iterator[tuple[str, Wave, Updater, torch.optim.Optimizer]]:
    """Yield the waves that have weights and an optimizer of their own, by name."""
    for name, wave in zip(_NAMES, player.waves, strict=True):
        if wave.updater is not None:
            assert wave.updater.optimizer is not None, "a wave trains something"
            yield name, wave, wave.updater, wave.updater.optimizer


def _own_of_replica(player: WavePlayer) -> dict[str, Tensor]:
    """Return what each replica has for itself: buffers, and gradients that are due."""
    found = {
        f"buffers/{name}/{key}": x
        for name, wave, *_ in _copies(player)
        for key, x in wave.buffers().items()
    }
    for due in player.due.values():
        gradients = enumerate(due.gradients)
        found |= {f"due/{i}": x for i, x in gradients if x is not None}
    return found


def _state_of(player: WavePlayer) -> dict[str, Any]:
    """Return the states of optimizers and schedules, by wave."""
    scaler = player.scaler
    found: dict[str, Any] = {
        "sync": player.settings.sync,
        "due": [[*key, due.num_samples] for key, due in player.due.items()],
        "scaler": None if scaler is None else scaler.state_dict(),
    }
    for name, _, updater, optimizer in _copies(player):
        scheduler = updater.scheduler
        found[name] = {
            "kind": type(optimizer).__name__,
            "optimizer": optimizer.state_dict(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "ema": updater.ema,
        }
    return found


def _read(path: Path, outline: Outline, player: WavePlayer, world: World) -> _Found:
    """Read what this worker needs.

    Raises:
        CheckpointError: it does not fit, or is damaged.
    """
    opened = open_checkpoint(path)
    record = opened.manifest.run
    if record.waves is None:
        raise CheckpointError(
            f"{path} is not of a run in two waves: hocket.Pipeline loads it; its "
            "weights alone: model.load_state_dict(hocket.checkpoint.read_weights(...))"
        )
    scales = record.waves.get("scaler") is not None
    if scales is (player.scaler is None):
        raise CheckpointError(
            f"{path} is of a run with{'' if scales else 'out'} a loss scale, and this "
            f"one has {'none' if scales else 'one'}: give the same precision=. Nothing "
            "was loaded"
        )
    own = player.settings.sync, player.settings.seed, world.world_size
    there = record.waves["sync"], record.seed, record.num_replicas
    if own != there:
        raise CheckpointError(
            f"{path} is of a run with sync={there[0]!r}, seed={there[1]} and "
            f"{there[2]} workers; this one has sync={own[0]!r}, seed={own[1]} and "
            f"{own[2]}: make it as then. Nothing was loaded"
        )
    locations: dict[str, TensorLocation] = {}
    for part, file in opened.files(Section.WAVE):
        if part.rank in (0, world.rank):
            own_of = opened.locations_in(file)
            if part.rank != world.rank:  # each replica has these for itself
                own_of = {k: x for k, x in own_of.items() if not k.startswith(_OWN)}
            locations |= own_of
    found = _Found(
        opened,
        record.waves,
        read_tensors(locations),
        read_tensors(opened.locations(Section.WEIGHTS)),
    )
    match_names(opened, outline)
    _check_states(path, player, _states_of(found))
    return found


def _weights_of(found: _Found, name: str) -> dict[str, Tensor]:
    """Return the weights and buffers of a wave on this replica."""
    weights = dict(found.weights) if name == "tick" else _within(found, f"{name}/")
    return weights | _within(found, f"buffers/{name}/")


def _within(found: _Found, prefix: str) -> dict[str, Tensor]:
    return {
        key.removeprefix(prefix): x
        for key, x in found.tensors.items()
        if key.startswith(prefix)
    }


def _states_of(found: _Found) -> Any:
    """Return the states of optimizers and schedules, by wave."""
    return decode(
        {k: x for k, x in found.record.items() if k in _NAMES},
        lambda name, _: found.tensors[name],
    )


def _check_states(path: Path, player: WavePlayer, states: Mapping[str, Any]) -> None:
    """Refuse states of other optimizers or schedules, before anything changes."""
    own = _state_of(player)
    for name, *_ in _copies(player):
        here, there = _described(own[name]), _described(states[name])
        if here != there:
            raise CheckpointError(
                f"{path} is of a run with {there}; this one has {here}. Nothing was "
                "loaded"
            )


def _described(state: Mapping[str, Any]) -> str:
    """Return which optimizer and schedule a state is of."""
    groups = "+".join(str(len(x["params"])) for x in state["optimizer"]["param_groups"])
    schedule = "no" if state["scheduler"] is None else "a"
    averages = "without" if state.get("ema") is None else "with"
    return (
        f"{state['kind']} over {groups} parameters and {schedule} learning-rate "
        f"schedule, {averages} averaged weights (ema_decay)"
    )


def _restore(found: _Found, player: WavePlayer, world: World) -> None:
    """Put a checkpoint's state in place."""
    state = _states_of(found)
    for name, wave, updater, optimizer in _copies(player):
        weights = _weights_of(found, name)
        for key, tensor in wave.state().items():
            tensor.copy_(weights[key])
        optimizer.load_state_dict(state[name]["optimizer"])
        if updater.scheduler is not None:
            updater.scheduler.load_state_dict(state[name]["scheduler"])
        updater.scheduled_rates = updater.rates()
        for key, average in (updater.ema or {}).items():
            average.copy_(state[name]["ema"][key])
    if player.scaler is not None:
        player.scaler.load_state_dict(found.record["scaler"])
    set_random_state(found.opened.parts[world.rank].random, world.device)


def _due_of(
    found: _Found, player: WavePlayer, world: World
) -> dict[tuple[int, int], Due]:
    """Return the gradients that the next update reads."""
    tensors = {int(i): x.to(world.device) for i, x in _within(found, "due/").items()}
    num = len(player.waves[0].parameters)
    return {
        (step, wave): Due(num_samples, [tensors.get(i) for i in range(num)])
        for step, wave, num_samples in found.record["due"]
    }
