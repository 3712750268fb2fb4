"""Collects what this worker writes: every tensor of the run is on one worker only.

Written by the first replica, each tensor by the device of the first stage that has it:

    stage 0, device 0   wte, h.0, h.1 ──▶ weights-0, optimizer-0
    stage 1, device 1   h.2, h.3, wte ──▶ weights-1, optimizer-1, without the tied wte
    replica 1           the same      ──▶ replica-2, replica-3: BatchNorm's buffers,
                                          which differ between replicas
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hocket import cuda
from hocket.errors import CheckpointError, DamagedError
from hocket.model.stages.outline import Outline
from hocket.model.stages.saved_modules import SavedModules
from hocket.model.trace.local import is_sharded, whole
from hocket.run.checkpoint.format.manifest import (
    ParameterGroup,
    RunRecord,
    Section,
    UpdateRecord,
)
from hocket.run.checkpoint.stale_weights import old_weights
from hocket.run.cluster.layout import Layout
from hocket.run.cluster.store.values import encode
from hocket.run.cluster.world import World
from hocket.run.engine.executor import Executor, PlayedLayout
from hocket.run.engine.gather import packed_extra
from hocket.run.engine.plan import Plan
from hocket.run.weights.updater import Updater

_NO_OPTIONS: Final = frozenset({"params", "param_names"})

Tensors = dict[Section, dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """The part of a checkpoint that one worker writes.

    Args:
        rank: the worker's rank.
        replica: the worker's replica.
        tensors: the tensors by section and name; live ones, until they are copied.
        updates: the optimizer of each of its stages that has one.
        random: the states of its random number generators.
        extra: the extra states of modules, packed.
    """

    rank: int
    replica: int
    tensors: Tensors
    updates: tuple[UpdateRecord, ...]
    random: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)


def collect(
    played: PlayedLayout,
    world: World,
    modules: SavedModules,
    watched: Mapping[str, Tensor],
) -> WorkerShare:
    """Return what this worker must write; nothing is copied.

    Args:
        played: what the workers play.
        world: the job.
        modules: those of the model that have an extra state.
        watched: what a freezing policy measured of this worker's weights, by name.

    Raises:
        CheckpointError: an optimizer or a schedule keeps what a checkpoint cannot hold.
    """
    executor, layout = played.executor, played.layout
    random = random_state(world.device)
    held = _held(played.plan, executor, layout.device)
    beside: Tensors = {}
    if layout.pipeline:
        beside = {Section.REPLICA: _named(executor, held, parameters=False)}
    if layout.pipeline >= layout.num_shards:
        return WorkerShare(layout.rank, layout.pipeline, beside, (), random)
    kept: dict[str, Tensor] = {}
    updates = tuple(
        updates_of(stage, updater, held, kept)
        for stage, updater in executor.updaters.items()
        if updater.optimizer is not None
    )
    tensors = {
        Section.WEIGHTS: {
            **_named(executor, held, parameters=True),
            **_named(executor, held, parameters=False),
        },
        Section.AVERAGED: {
            name: x.detach()
            for updater in executor.updaters.values()
            for name, x in (updater.ema or {}).items()
            if name in held
        },
        Section.OPTIMIZER: kept,
        Section.OLD: old_weights(executor.runners.values(), held),
        Section.WATCHED: {name: x for name, x in watched.items() if name in held},
    }
    keeps = not (layout.pipeline or layout.tp_rank)
    if executor.shards is not None or layout.tp_size > 1:
        # Those that share them gather together.
        tensors = {
            at: dict(_wholes(named, keeps=keeps)) for at, named in tensors.items()
        }
    if not keeps:
        return WorkerShare(layout.rank, layout.pipeline, beside, (), random)
    extra = packed_extra(modules, executor.runners.values(), layout.rank)
    return WorkerShare(layout.rank, 0, tensors, updates, random, extra)


def describe(outline: Outline, executor: Executor, layout: Layout) -> RunRecord:
    """Return the facts of the run that every worker knows and that never change."""
    has_averages = any(x.ema is not None for x in executor.updaters.values())
    return record_of(outline, layout.num_pipelines, has_averages=has_averages)


def record_of(outline: Outline, num_replicas: int, *, has_averages: bool) -> RunRecord:
    """Return a run's record before its first step, without what changes."""
    state = outline.state
    ties = {
        first_name: tuple(x for x in names[1:] if x in state.persistent)
        for first_name, names in state.names.items()
    }
    return RunRecord(
        step=0,
        num_replicas=num_replicas,
        has_averages=has_averages,
        ties={name: others for name, others in ties.items() if others},
        config=_config(outline),
    )


def _held(plan: Plan, executor: Executor, device: int) -> frozenset[str]:
    """Return the names that a device writes: those whose first stage is there.

    And those of buffers that a forward has set where there were none.
    """
    owners: dict[str, int] = {}
    for stage, names in enumerate(plan.state_names):
        for name in names:
            owners.setdefault(name, plan.schedule.program.stages[stage].device)
    for runner in executor.runners.values():
        owners = dict.fromkeys(runner.saved_state(parameters=False), device) | owners
    return frozenset(name for name, owner in owners.items() if owner == device)


def _named(
    executor: Executor, held: frozenset[str], *, parameters: bool
) -> dict[str, Tensor]:
    return {
        name: executor.stored(x).detach()
        for runner in executor.runners.values()
        for name, x in runner.saved_state(parameters=parameters).items()
        if name in held
    }


def _wholes(
    named: Mapping[str, Tensor], *, keeps: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with those that are sharded gathered, one by one, on the host.

    Args:
        named: the tensors.
        keeps: whether this worker writes them.
    """
    for name, tensor in named.items():
        found = whole(tensor)
        if keeps:
            yield name, found.cpu() if is_sharded(tensor) else found


def updates_of(
    stage: int, updater: Updater, held: Collection[str], tensors: dict[str, Tensor]
) -> UpdateRecord:
    """Return the record of a stage's optimizer and schedule.

    Args:
        stage: the stage.
        updater: the stage's updater, which has an optimizer.
        held: the names of the weights whose states this worker writes.
        tensors: gets the tensors of these states, by name.

    Raises:
        CheckpointError: they keep what a checkpoint cannot hold.
    """
    assert updater.optimizer is not None
    names = {id(x): name for name, x in updater.parameters.items()}
    groups = tuple(
        ParameterGroup(
            {
                key: encode(value, f"#{stage}.{i}/{key}", tensors)
                for key, value in group.items()
                if key not in _NO_OPTIONS
            },
            tuple(_name(names, x) for x in group["params"]),
        )
        for i, group in enumerate(updater.optimizer.param_groups)
    )
    states = {}
    for parameter, state in updater.optimizer.state.items():
        name = _name(names, parameter)
        if name in held:
            states[name] = encode(dict(state), name, tensors)
    kind = type(updater.optimizer).__qualname__
    known = UpdateRecord(kind, groups, states)
    if updater.scheduler is None:
        return known
    state = encode(updater.scheduler.state_dict(), f"#{stage}/scheduler", tensors)
    name = type(updater.scheduler).__qualname__
    return replace(known, scheduler=name, scheduler_state=state)


def _name(names: dict[int, str], parameter: Any) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            "the optimizer updates a parameter that is not the model's: a checkpoint "
            "knows the model's names only"
        )
    return names[id(parameter)]


def _config(outline: Outline) -> dict[str, Any] | None:
    """Return the config.json of a model of the transformers library."""
    if outline.config is None:
        return None
    found: dict[str, Any] = json.loads(outline.config.to_json_string(use_diff=True))
    return {**found, "architectures": [outline.kind]}


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of this process, as JSON.

    Args:
        device: the device whose generator is saved beside the CPU's.
    """
    version, numbers, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "torch": _text(torch.default_generator.get_state()),
        "python": [version, list(numbers), gauss],
        "numpy": [str(kind), [int(x) for x in keys], place, has_gauss, float(cached)],
    }
    if _on_gpu(device):
        state["cuda"] = _text(cuda.generator(device).get_state())
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore states.

    Raises:
        DamagedError: the states are not valid.
    """
    gpu = cuda.generator(device) if _on_gpu(device) else None
    _set(state, torch.default_generator, random, np.random, gpu)


def check_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Check that states can be restored; no generator in use changes.

    Raises:
        DamagedError: the states are not valid.
    """
    gpu = torch.Generator(device) if _on_gpu(device) else None
    _set(state, torch.Generator(), random.Random(), np.random.RandomState(), gpu)


def _set(
    state: Mapping[str, Any],
    cpu: torch.Generator,
    python: Any,
    numpy: Any,
    gpu: torch.Generator | None,
) -> None:
    """Set the states of generators, or of the modules that have one."""
    try:
        cpu.set_state(_tensor(state["torch"]))
        version, numbers, gauss = state["python"]
        python.setstate((version, tuple(numbers), gauss))
        kind, keys, *rest = state["numpy"]
        numpy.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
        if gpu is not None and "cuda" in state:
            gpu.set_state(_tensor(state["cuda"]))
    except Exception as error:  # each of the generators refuses in ways of its own
        raise DamagedError(f"random states are not valid: {error}") from error


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
