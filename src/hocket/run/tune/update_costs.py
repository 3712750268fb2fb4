"""Measures an update's seconds and bytes on copies of the weights.

An update is all that a lane does when gradients are complete: compute norms, clip, copy
weights that are still read, and step. Seconds are a median; the first `delay` updates
of a stage, which still copy less, do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.core.costs import StageCost
from hocket.core.program import Program
from hocket.errors import ConfigError, HocketError
from hocket.model.profile.allocations import allocations
from hocket.model.profile.precision import timed_rounds
from hocket.model.stages.stage import StageModule
from hocket.model.trace.local import local
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.stage.versions import WeightVersions
from hocket.run.weights.gradients import Gradients
from hocket.run.weights.masters import Masters
from hocket.run.weights.settings import TrainingConfig
from hocket.run.weights.updater import Updater

_NUM_STEPS = 5
_ENOUGH_BYTES = 1 << 26  # of weights: of more, a fifth is measured
_OF = 5  # parts: copies, gradients and what optimizers keep take as much again
_CACHE_BYTES = 1 << 24  # read before each step: training leaves caches cold
_GRADIENT = 1e-3  # of each element; zeros take AdamW twice as long on a CPU


def measure_updates(
    stages: Sequence[StageCost],
    modules: Sequence[StageModule],
    program: Program,
    settings: TrainingConfig,
    context: WorkerContext,
) -> tuple[StageCost, ...]:
    """Return the stages with the costs of their updates, on the workers that hold them.

    Every worker must call this.

    Args:
        stages: the costs of all stages, without updates.
        modules: all stages.
        program: the stages' devices and delays.
        settings: as for the pipeline; the optimizer is made once more per stage, on
            copies.
        context: this worker's context.

    Raises:
        ConfigError: an optimizer cannot be stepped as pipelines do it.
    """
    world, measured = context.world, {}
    for stage in program.stages_on[context.layout.device]:
        module, delay = modules[stage].to(world.device), program.stages[stage].delay
        measured[str(stage)] = _measured(module, settings, world.device, delay)
    found: dict[str, Any] = {}
    for part in world.gather_json(measured, "update costs"):
        found |= part
    return tuple(replace(x, **found.get(str(i), {})) for i, x in enumerate(stages))


def _measured(
    module: StageModule, settings: TrainingConfig, device: torch.device, delay: int
) -> dict[str, float]:
    """Return the fields of a stage's cost that are of its update; none without one."""
    trained = {k: p for k, p in module.named_parameters() if p.requires_grad}
    settings = replace(settings, scheduler=None)
    part, found = _part_of(trained), None
    if len(part) < len(trained):
        with suppress(Exception):  # an optimizer may ask for parameters by their names
            found = _measured_on(_copies(part), settings, device, delay)
    if found is None:
        part = trained
        found = _measured_on(_copies(part), settings, device, delay)
    scale = _bytes_of(trained) / max(1, _bytes_of(part))
    found = found or {}
    sizes = {k: round(x * scale) for k, x in found.items() if k.endswith("_bytes")}
    return {name: value * scale for name, value in found.items()} | sizes


def _part_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return as many of a stage's parameters as stand for all of them.

    Their copies, with gradients and state, are not to take more than the stage.
    """
    most = max(_ENOUGH_BYTES, _bytes_of(parameters) // _OF)
    found: dict[str, nn.Parameter] = {}
    left = most
    for name, x in sorted(parameters.items(), key=lambda item: item[1].nbytes):
        if x.nbytes <= left or not found:
            found[name] = x
            left -= x.nbytes
    return {name: x for name, x in parameters.items() if name in found}


def _bytes_of(parameters: Mapping[str, nn.Parameter]) -> int:
    return sum(x.nbytes for x in parameters.values())


def _copies(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {k: nn.Parameter(p.detach().clone()) for k, p in parameters.items()}


def _measured_on(
    copies: dict[str, nn.Parameter],
    settings: TrainingConfig,
    device: torch.device,
    delay: int,
) -> dict[str, float] | None:
    """Return the fields of an update of these parameters; None if there is none."""
    try:
        updater = _updater_of(copies, settings)
    except ValueError:  # all parameters are left out
        return None
    if updater.optimizer is None:
        return None
    # As if this worker were the only one.
    kept = updater.parameters
    gradients = Gradients(
        tuple(kept),
        kept,
        frozenset(kept),
        None,
        device=device,
        dtype=reduce(torch.promote_types, {x.dtype for x in kept.values()}),
    )
    weights = nn.ParameterList(copies.values())
    versions = WeightVersions(weights, delay) if delay else None
    seconds: list[float] = []
    spans = timed_rounds(seconds, device, _NUM_STEPS - 1, num_warm=delay + 1)
    for step, span in enumerate(spans):
        give_gradients(kept.values())
        if versions is not None:
            versions.complete(step)
        passed = torch.zeros(_CACHE_BYTES // 4)
        passed += 1
        with span:
            status = gradients.status_of(gradients.own_norms())
            if settings.clip_norm is not None:
                gradients.clip(status.norm, settings.clip_norm)
            if versions is not None:
                versions.before_update()
            _update(updater)
        if versions is not None:
            versions.after_update()
    return {
        "update_s": median(seconds),
        "optimizer_bytes": _state_bytes(updater),
        "update_work_bytes": _work_bytes(copies, settings, device),
    }


def _updater_of(
    copies: Mapping[str, nn.Parameter], settings: TrainingConfig
) -> Updater:
    """Make the updater of some weights, with their masters where there are any."""
    masters = Masters(copies.values() if settings.compute_precision.has_masters else ())
    kept = {name: masters.by_weight.get(id(x), x) for name, x in copies.items()}
    return Updater(kept, settings, masters=masters)


def _state_bytes(updater: Updater) -> int:
    """Return the bytes of state that an update leaves for later ones."""
    assert updater.optimizer is not None
    state = pytree.tree_leaves(updater.optimizer.state_dict()["state"])
    state += (updater.ema or {}).values()
    state += updater.masters.by_weight.values()
    return sum(local(x).nbytes for x in state if isinstance(x, Tensor))


def _update(updater: Updater) -> None:
    try:
        updater.update()
    except HocketError:
        raise
    except Exception as error:
        raise ConfigError(
            f"step() of the {type(updater.optimizer).__name__} failed when it was "
            f"tried on copies of the weights: {type(error).__name__}: {error}. A "
            "pipeline calls it once per step, without a closure"
        ) from error


def _work_bytes(
    copies: Mapping[str, nn.Parameter],
    settings: TrainingConfig,
    device: torch.device,
) -> int:
    """Return the most that an update allocates beside what it keeps."""
    with allocations(device) as log:
        updater = _updater_of(copies, settings)
        for _ in range(2):
            give_gradients(updater.parameters.values())
            with log.span():
                updater.update()
    return log.peaks[-1]


def give_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Set the gradient of each parameter, as for an update that is measured."""
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, _GRADIENT)
