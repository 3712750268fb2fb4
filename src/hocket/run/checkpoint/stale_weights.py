"""Saves and restores the old weights that delayed stages still read.

    saved              w/2  w/1      before the last update but one, before the last
    now   delay 2      w/2  w/1      the next step reads what it would have read
          delay 1           w/1
          delay 3  w/2 w/2  w/1      the oldest replaces what is older
          delay 0                    no stage reads any

A weight that was not delayed when it was saved has none: the newest replaces them, as
at the beginning of training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count

import torch
from torch import Tensor, nn

from hocket.errors import DamagedError
from hocket.model.stages.outline import Outline
from hocket.run.checkpoint.format.manifest import Section
from hocket.run.checkpoint.format.opened import OpenedCheckpoint, TensorLocation
from hocket.run.engine.plan import Plan
from hocket.run.stage.runner import StageRunner


def old_weights(
    runners: Iterable[StageRunner], held: Collection[str]
) -> dict[str, Tensor]:
    """Return the old weights of some stages, by name and age; nothing is copied.

    Args:
        runners: the runners of this worker's stages.
        held: the names of the weights whose old versions are wanted.
    """
    found: dict[str, Tensor] = {}
    for runner in runners:
        old = [] if runner.versions is None else runner.versions.old()
        for own in old[0] if old else ():
            name = f"{runner.saved_prefix}{own}"
            if name in held:
                found.update(by_age(name, [weights[own] for weights in old]))
    return found


def num_wanted(plan: Plan, outline: Outline, step: int) -> dict[str, int]:
    """Return how many old versions of each delayed weight exist after some steps.

    A shared weight has one delay in all of its stages.
    """
    state = outline.state
    parameters = set(filter(state.is_parameter, state.tensors))
    trained = parameters & state.trained.keys()
    stages = plan.schedule.program.stages
    wanted: dict[str, int] = {}
    for stage, names in zip(stages, plan.state_names, strict=True):
        moved = trained if stage.trainable else parameters  # all of one that follows
        for name in moved.intersection(names) if stage.delay else ():
            wanted[name] = max(min(stage.delay, step), wanted.get(name, 0))
    return wanted


def moved_in(runner: StageRunner) -> dict[str, nn.Parameter]:
    """Return the parameters of which a stage may keep old versions, by saved name.

    Those are the trained ones; all of a stage that follows others.
    """
    prefix = runner.saved_prefix
    if prefix is None:
        return {}
    return {
        f"{prefix}{name}": p
        for name, p in runner.parameters.items()
        if p.requires_grad or not runner.trainable
    }


def old_places(
    opened: OpenedCheckpoint, names: Mapping[str, str], wanted: Mapping[str, int]
) -> dict[str, TensorLocation]:
    """Return the locations of the old weights to load, by their names there.

    Args:
        opened: the checkpoint.
        names: the weights' names there, by the model's names.
        wanted: how many old versions of each, by the model's names.

    Raises:
        DamagedError: a tensor has another form than its weight.
    """
    weights, old = opened.locations(Section.WEIGHTS), opened.locations(Section.OLD)
    found: dict[str, TensorLocation] = {}
    for name, num in wanted.items():
        stored = stored_names(old, names[name], num)
        found |= form_checked(old, stored, weights[names[name]])
    return found


def put_old(
    runner: StageRunner,
    names: Mapping[str, str],
    wanted: Mapping[str, int],
    tensors: Mapping[str, Tensor],
) -> None:
    """Load a stage's old weights; it has the newest already.

    Args:
        runner: the stage's runner.
        names: the weights' names in the checkpoint, by the model's names.
        wanted: how many old versions of each, by the model's names.
        tensors: the tensors that were read, by their names in the checkpoint.
    """
    if runner.versions is None:
        return
    moved = {n: p for n, p in moved_in(runner).items() if n in wanted}
    num = max((wanted[name] for name in moved), default=0)
    old: list[dict[str, Tensor]] = [{} for _ in range(num)]
    for name, parameter in moved.items():
        stored = stored_names(tensors, names[name], num)
        values = [tensors[x] for x in stored] or [parameter.detach()] * num
        own = name.removeprefix(runner.saved_prefix or "")
        for weights, value in zip(old, values, strict=True):
            weights[own] = like(parameter, value)
    runner.versions.set_old(old)


def stored_names(known: Collection[str], name: str, num: int) -> list[str]:
    """Return the names of the last `num` old versions of a weight, the oldest first.

    Names repeat if fewer are known; there are none if none is known.
    """
    there = names_by_age(known, name)
    if len(there) >= num:
        return there[len(there) - num :]
    return there[:1] * (num - len(there)) + there


def by_age(name: str, tensors: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Return tensors of a weight, the oldest first, each with its own name."""
    for i, tensor in enumerate(tensors):
        yield f"{name}/{len(tensors) - i}", tensor


def names_by_age(known: Collection[str], name: str) -> list[str]:
    """Return the names of all known tensors of a weight, the oldest first."""
    num = next(age for age in count() if f"{name}/{age + 1}" not in known)
    return [f"{name}/{age}" for age in range(num, 0, -1)]


def form_checked(
    locations: Mapping[str, TensorLocation],
    names: Sequence[str],
    weight: TensorLocation,
) -> dict[str, TensorLocation]:
    """Return the locations of some tensors of a weight.

    Args:
        locations: the tensors' locations, by name.
        names: the names to return.
        weight: the weight's own location.

    Raises:
        DamagedError: a tensor has another form than the weight.
    """
    types = weight.record.dtype, "BF16"  # of a weight whose master is saved
    for name in names:
        record = locations[name].record
        if record.dtype not in types or record.shape != weight.record.shape:
            raise DamagedError(
                f"{locations[name].path}: {name} has another shape or type than the "
                "weight that it belongs to"
            )
    return {name: locations[name] for name in names}


def like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a copy on the parameter's device, with its strides."""
    return torch.empty_like(parameter.detach()).copy_(value)
