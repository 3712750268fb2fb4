"""Restores what was read: all checks come before the first change."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from hocket.errors import DamagedError
from hocket.model.stages.outline import Outline
from hocket.model.trace.local import is_sharded, local, part_of
from hocket.model.trace.state import overwrite
from hocket.run.checkpoint.collect import check_random_state, set_random_state
from hocket.run.checkpoint.format.manifest import RunRecord, Section
from hocket.run.checkpoint.format.opened import OpenedCheckpoint, TensorLocation
from hocket.run.checkpoint.match import (
    check_kind,
    check_setup,
    check_updates,
    match_names,
)
from hocket.run.checkpoint.regroup import RegroupedUpdates, SavedUpdates
from hocket.run.checkpoint.stale_weights import (
    moved_in,
    num_wanted,
    old_places,
    put_old,
)
from hocket.run.cluster.layout import Layout
from hocket.run.cluster.store.values import decode, tensor_names
from hocket.run.engine.executor import Executor
from hocket.run.engine.plan import Plan
from hocket.run.weights.updater import Updater

Key = tuple[Section, str]
T = TypeVar("T")


def check_fits(opened: OpenedCheckpoint, outline: Outline, here: RunRecord) -> None:
    """Check that a checkpoint is of this model, and of a run with equal settings.

    Raises:
        CheckpointError: it is not.
    """
    match_names(opened, outline)
    check_setup(opened.path, opened.manifest.run, here)


@dataclass(frozen=True, slots=True)
class LiveState:
    """What a process has of a run, into which a checkpoint is restored.

    Args:
        tensors: its weights and buffers, by the model's names.
        updaters: what updates the weights, by stage.
        scaler: the gradient scaler, for float16.
        device: the device whose generator is restored beside the CPU's.
    """

    tensors: Mapping[str, Tensor]
    updaters: Mapping[int, Updater]
    scaler: torch.amp.GradScaler | None
    device: torch.device

    @classmethod
    def of(cls, executor: Executor) -> LiveState:
        """Return what an executor has."""
        tensors = dict(_stage_tensors(executor))
        device = executor.context.world.device
        return cls(tensors, executor.updaters, executor.scaler, device)


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The state that a worker takes from a checkpoint.

    Args:
        opened: the checkpoint.
        names: the names in the checkpoint, by the model's names.
        num_old: the number of old versions that each delayed weight needs.
        updates: the state for each of the worker's optimizers, by stage.
        locations: the tensors' locations, by section and name in the checkpoint.
        spare: the locations of tensors that no worker takes; rank 0 checks them too.
        random: the states of the generators.
    """

    opened: OpenedCheckpoint
    names: Mapping[str, str]
    num_old: Mapping[str, int]
    updates: Mapping[int, RegroupedUpdates]
    locations: Mapping[Key, TensorLocation]
    spare: Mapping[str, TensorLocation]
    random: Mapping[str, Any]


def plan_of_whole(
    opened: OpenedCheckpoint, outline: Outline, live: LiveState, here: RunRecord
) -> RestorePlan:
    """Find what a process needs whose weights are the newest alone.

    Raises:
        CheckpointError: the checkpoint is of another model, or of a run with other
            settings.
    """
    names = match_names(opened, outline)
    check_setup(opened.path, opened.manifest.run, here)
    updates = updates_in(opened, names, live.updaters)
    weights = opened.locations(Section.WEIGHTS)
    locations: dict[Key, TensorLocation] = {
        (Section.WEIGHTS, names[name]): weights[names[name]] for name in live.tensors
    }
    locations |= state_places(opened, names, updates, live.updaters)
    random = opened.parts[0].random
    return RestorePlan(opened, names, {}, updates, locations, {}, random)


def make_restore_plan(
    opened: OpenedCheckpoint,
    outline: Outline,
    executor: Executor,
    plan: Plan,
    layout: Layout,
    here: RunRecord,
) -> RestorePlan:
    """Find what this worker needs, and refuse a checkpoint that does not fit.

    Raises:
        CheckpointError: the checkpoint is of another model, or of a run with other
            settings.
    """
    newest = plan_of_whole(opened, outline, LiveState.of(executor), here)
    names, run = newest.names, opened.manifest.run
    num_old = num_wanted(plan, outline, run.step)
    locations = dict(newest.locations)
    locations |= _replica_places(opened, layout)
    moved = {name for runner in executor.runners.values() for name in moved_in(runner)}
    own = {name: num for name, num in num_old.items() if name in moved}
    old = old_places(opened, names, own)
    locations |= {(Section.OLD, name): place for name, place in old.items()}
    locations |= _watched_places(opened, names, executor)
    watched = opened.locations(Section.WATCHED)
    used = {
        Section.WATCHED: watched if run.freezing and here.freezing else (),
        Section.OLD: old_places(opened, names, num_old),
        Section.CORRECTION: (),
    }
    spare = _spare(opened, names, outline, used)
    is_same_job = len(opened.parts) == layout.num_devices * layout.num_pipelines
    random = opened.parts[layout.rank if is_same_job else 0].random
    return replace(
        newest, num_old=num_old, locations=locations, spare=spare, random=random
    )


def restore_stages(
    plan_to_restore: RestorePlan, tensors: Mapping[Key, Tensor], executor: Executor
) -> None:
    """Restore what an executor has, old versions of weights among it."""
    restore(plan_to_restore, tensors, LiveState.of(executor))
    old = _of(Section.OLD, tensors)
    for runner in executor.runners.values():
        put_old(runner, plan_to_restore.names, plan_to_restore.num_old, old)
        runner.seed = plan_to_restore.opened.manifest.run.seed


def restore(
    plan_to_restore: RestorePlan, tensors: Mapping[Key, Tensor], live: LiveState
) -> None:
    """Restore weights, optimizers, schedules, averages and generators."""
    for name, target in live.tensors.items():
        stored = plan_to_restore.names[name]
        own = tensors.get((Section.REPLICA, stored))
        value = tensors[Section.WEIGHTS, stored] if own is None else own
        overwrite(local(target.detach()), local(part_of(value, target)))
    for stage, updater in live.updaters.items():
        put_averages(updater, plan_to_restore.names, tensors)
        if stage in plan_to_restore.updates:
            put_updates(updater, plan_to_restore.updates[stage], tensors)
        updater.masters.write()
    if live.scaler is not None:
        live.scaler.load_state_dict(plan_to_restore.opened.manifest.run.scaler)
    set_random_state(plan_to_restore.random, live.device)


def check_states(
    plan_to_restore: RestorePlan, tensors: Mapping[Key, Tensor], live: LiveState
) -> None:
    """Check all state but the weights; nothing is changed.

    Raises:
        CheckpointError: it is of another kind than this run's.
    """
    run = plan_to_restore.opened.manifest.run
    for stage, new in plan_to_restore.updates.items():
        check_updates(live.updaters[stage], new, partial(placed, tensors, None))
    if live.scaler is not None:
        check_kind("the gradient scaler", run.scaler, live.scaler.state_dict())
    check_random_state(plan_to_restore.random, live.device)


def _stage_tensors(executor: Executor) -> Iterator[tuple[str, Tensor]]:
    for runner in executor.runners.values():
        for name, x in runner.saved_state(parameters=True).items():
            yield name, executor.stored(x)
        yield from runner.saved_state(parameters=False).items()


def updates_in(
    opened: OpenedCheckpoint, names: Mapping[str, str], updaters: Mapping[int, Updater]
) -> dict[int, RegroupedUpdates]:
    """Return the states of optimizers and schedules in a checkpoint, by stage.

    Raises:
        CheckpointError: they are of others.
    """
    freezing = opened.manifest.run.freezing
    frozen = () if freezing is None else freezing.parameters
    saved = SavedUpdates(opened.parts, names, frozen)
    found = {}
    for stage, updater in updaters.items():
        if updater.optimizer is None:
            continue
        name_of = {id(x): name for name, x in updater.parameters.items()}
        groups = [
            [name_of[id(x)] for x in group["params"]]
            for group in updater.optimizer.param_groups
        ]
        scheduler = updater.scheduler
        found[stage] = saved.regrouped(
            groups,
            type(updater.optimizer).__qualname__,
            None if scheduler is None else type(scheduler).__qualname__,
        )
    return found


def state_places(
    opened: OpenedCheckpoint,
    names: Mapping[str, str],
    updates: Mapping[int, RegroupedUpdates],
    updaters: Mapping[int, Updater],
) -> dict[Key, TensorLocation]:
    """Return the locations of the tensors of these states, and of averaged weights."""
    optimizer = opened.locations(Section.OPTIMIZER)
    averaged = opened.locations(Section.AVERAGED)
    found = {
        (Section.OPTIMIZER, name): _known(optimizer, name, opened)
        for new in updates.values()
        for value in (*new.options, new.states, new.scheduler)
        for name in tensor_names(value)
    }
    for updater in updaters.values():
        for name in updater.ema or {}:
            place = _known(averaged, names[name], opened)
            found[Section.AVERAGED, names[name]] = place
    return found


def _known(
    locations: Mapping[str, TensorLocation], name: str, opened: OpenedCheckpoint
) -> TensorLocation:
    if name not in locations:
        raise DamagedError(f"{opened.path} does not hold {name}, which it names")
    return locations[name]


def _replica_places(
    opened: OpenedCheckpoint, layout: Layout
) -> dict[Key, TensorLocation]:
    """Return the locations of this replica's buffers, if as many were saved."""
    if opened.manifest.run.num_replicas != layout.num_pipelines:
        return {}
    return {
        (Section.REPLICA, name): location
        for part, file in opened.files(Section.REPLICA)
        if part.replica == layout.pipeline
        for name, location in opened.locations_in(file).items()
    }


def _watched_places(
    opened: OpenedCheckpoint, names: Mapping[str, str], executor: Executor
) -> dict[Key, TensorLocation]:
    """Return the locations of what a policy measured of the weights that are here."""
    watched = opened.locations(Section.WATCHED)
    return {
        (Section.WATCHED, names[name]): watched[names[name]]
        for runner in executor.runners.values()
        for name in runner.saved_state(parameters=True)
        if names[name] in watched
    }


def watched_tensors(
    restored: RestorePlan, tensors: Mapping[Key, Tensor]
) -> dict[str, Tensor]:
    """Return what a policy measured, by the model's names, of the weights here."""
    read = _of(Section.WATCHED, tensors)
    names = restored.names.items()
    return {name: read[stored] for name, stored in names if stored in read}


def _spare(
    opened: OpenedCheckpoint,
    names: Mapping[str, str],
    outline: Outline,
    used: Mapping[Section, Container[str]],
) -> dict[str, TensorLocation]:
    """Return the tensors that no worker takes: of other replicas, or frozen now.

    Args:
        opened: the checkpoint.
        names: the names in the checkpoint, by the model's names.
        outline: the uncut model's outline.
        used: the locations that delayed stages take.
    """
    trained = {names[name] for name in outline.state.trained}
    taken: set[str] = set()
    for part in opened.parts:
        for updates in part.updates:
            for name in trained & updates.states.keys():
                taken.update(tensor_names(updates.states[name]))
    left = {
        f"{file.name}: {name}": location
        for _, file in opened.files(Section.REPLICA)
        for name, location in opened.locations_in(file).items()
    }
    used = {Section.OPTIMIZER: taken, Section.AVERAGED: trained, **used}
    return left | {
        f"{section.value} {name}": place
        for section, names_used in used.items()
        for name, place in opened.locations(section).items()
        if name not in names_used
    }


def _of(section: Section, values: Mapping[Key, T]) -> dict[str, T]:
    return {name: value for (at, name), value in values.items() if at is section}


def put_averages(
    updater: Updater, names: Mapping[str, str], tensors: Mapping[Key, Tensor]
) -> None:
    """Restore averaged weights, if there are any."""
    for name, average in (updater.ema or {}).items():
        value = part_of(tensors[Section.AVERAGED, names[name]], average)
        local(average).copy_(local(value))


def put_updates(
    updater: Updater, new: RegroupedUpdates, tensors: Mapping[Key, Tensor]
) -> None:
    """Restore the state of an optimizer and its schedule."""
    assert updater.optimizer is not None
    for group, options in zip(updater.optimizer.param_groups, new.options, strict=True):
        group.update(decode(dict(options), partial(placed, tensors, None)))
    updater.optimizer.state.clear()
    for name, state in new.states.items():
        parameter = updater.parameters[name]
        place = partial(placed, tensors, parameter)
        updater.optimizer.state[parameter] = decode(state, place)
    if updater.scheduler is not None and new.scheduler is not None:
        state = decode(new.scheduler, partial(placed, tensors, None))
        updater.scheduler.load_state_dict(state)
    updater.scheduled_rates = updater.rates()


def placed(
    tensors: Mapping[Key, Tensor], like: Tensor | None, name: str, on_host: bool
) -> Tensor:
    """Return a tensor of the optimizer's state, on a parameter's device if given.

    Args:
        tensors: the tensors that were read.
        like: the parameter; a tensor of its shape gets its strides.
        name: the tensor's name in the checkpoint.
        on_host: whether the tensor was on the host beside a parameter on a GPU.
    """
    value = tensors[Section.OPTIMIZER, name]
    if like is None or (on_host and like.device.type != "cpu"):
        return value
    if value.shape != like.shape:
        return value.to(like.device)
    if is_sharded(like):
        return part_of(value, like).detach()
    return torch.empty_like(like, dtype=value.dtype).copy_(value).detach()
