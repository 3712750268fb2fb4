"""Checks that a checkpoint fits this model, this run's settings and its optimizers.

All saved state is decoded and compared before anything changes: a state that an
optimizer cannot use would otherwise end the run in the middle of its next update.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from hocket.errors import CheckpointError, DamagedError
from hocket.model.stages.outline import Outline
from hocket.model.trace.state import gradient_type
from hocket.run.checkpoint.format.manifest import RunRecord, Section
from hocket.run.checkpoint.format.opened import OpenedCheckpoint, name_of
from hocket.run.checkpoint.regroup import RegroupedUpdates
from hocket.run.cluster.store.values import decode
from hocket.run.weights.updater import Updater

_NUM_SHOWN: Final = 3


def match_names(opened: OpenedCheckpoint, outline: Outline) -> dict[str, str]:
    """Return the checkpoint's name of each of the model's tensors, by first name.

    A tied weight may have any of its names there.

    Args:
        opened: the checkpoint.
        outline: the uncut model's.

    Raises:
        CheckpointError: the checkpoint is of another model; lists the differences.
    """
    locations, state = opened.locations(Section.WEIGHTS), outline.state
    extra_there, extra_here = opened.extra.keys(), outline.modules.extra_names
    expected = {
        first: state.tensors[first]
        for first, names in state.names.items()
        if not state.persistent.isdisjoint(names)
    }
    found: dict[str, str] = {}
    unknown = sorted(extra_there - extra_here)
    twice = []
    for name, place in locations.items():
        first = state.first_name.get(name, name)
        if first not in expected:
            unknown.append(name)
        elif first in found:
            if locations[found[first]].record.sha256 != place.record.sha256:
                twice.append(f"{name} and {found[first]}")
        else:
            found[first] = name
    forms = []
    for first, name in found.items():
        record, tensor = locations[name].record, expected[first]
        there = _form(record.dtype, record.shape)
        # Masters have the type of gradients: what is saved of weights that have some.
        types = tensor.dtype, gradient_type(tensor)
        here = [_form(name_of(x, first), tensor.shape) for x in types]
        if there not in here:
            forms.append(f"{first}: {there} there, {here[0]} here")
    missing = [x for x in expected if x not in found]
    missing += sorted(extra_here - extra_there)
    faults = [
        _several("name", "only in the checkpoint", unknown),
        _several("name", "only in the model", missing),
        _several("tensor", "of another shape or type", forms),
        _several("tied weight", "saved with two values", twice),
    ]
    if any(faults):
        raise CheckpointError(
            f"{opened.path} is of another model: {'; '.join(filter(None, faults))}. "
            "Nothing was loaded"
        )
    return found


def check_setup(path: Path, there: RunRecord, here: RunRecord) -> None:
    """Check that this run keeps the same kinds of state as the one that was saved.

    Args:
        path: the checkpoint.
        there: the saved run's record.
        here: this run's record.

    Raises:
        CheckpointError: the runs differ; names what differs.
    """
    if there.waves is not None:
        raise CheckpointError(
            f"{path} is of a run in two waves: load it with hocket.Waves; to take the "
            "weights alone, export them and load them into the model before the "
            "pipeline is made. Nothing was loaded"
        )
    kinds = [
        (
            "gradient scaler (precision)",
            there.scaler is not None,
            here.scaler is not None,
        ),
        ("averaged weights (ema_decay)", there.has_averages, here.has_averages),
    ]
    differing = [
        f"{what} {'here' if own else 'there'}, but none {'there' if own else 'here'}"
        for what, saved, own in kinds
        if saved != own
    ]
    if differing:
        raise CheckpointError(
            f"{path} is of a run that was set up in another way: "
            f"{'; '.join(differing)}. Make the pipeline as then; to take the weights "
            "alone, export them and load them into the model before the pipeline is "
            "made. Nothing was loaded"
        )


def _form(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _several(what: str, where: str, items: Sequence[str]) -> str:
    """Format `2 names only in the model (a, b)`, or nothing."""
    if not items:
        return ""
    more = ", ..." if len(items) > _NUM_SHOWN else ""
    plural = "s" if len(items) > 1 else ""
    shown = ", ".join(items[:_NUM_SHOWN])
    return f"{len(items):,} {what}{plural} {where} ({shown}{more})"


_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

GetTensor = Callable[[str, bool], Tensor]


def check_updates(
    updater: Updater, new: RegroupedUpdates, get_tensor: GetTensor
) -> None:
    """Check the state for one stage's optimizer and schedule.

    Args:
        updater: the stage's updater, which is not changed.
        new: the state to be loaded.
        get_tensor: returns the saved tensor of a name.

    Raises:
        CheckpointError: an optimizer or a schedule of this class keeps other kinds of
            values; names the parameter and the key.
    """
    optimizer, scheduler = updater.optimizer, updater.scheduler
    assert optimizer is not None
    options = [_decoded(x, get_tensor, "the optimizer's options") for x in new.options]
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        own = {key: value for key, value in group.items() if key in saved}
        check_kind("the optimizer's options", saved, own, is_strict=False)
    stepped = _state_after_a_step(optimizer, options)
    for name, state in new.states.items():
        parameter = updater.parameters[name]
        own = stepped.get(id(parameter)) or optimizer.state.get(parameter, {})
        check_kind(name, _decoded(state, get_tensor, name), own)
    if scheduler is not None and new.scheduler is not None:
        saved = _decoded(new.scheduler, get_tensor, "the learning-rate schedule")
        check_kind(
            "the learning-rate schedule", saved, scheduler.state_dict(), is_strict=False
        )
        trial = copy.deepcopy(scheduler, {id(optimizer): optimizer})
        try:
            trial.load_state_dict(saved)
        except Exception as error:  # of any kind, since any class may be here
            raise CheckpointError(
                "the learning-rate schedule: the checkpoint's state cannot be loaded "
                f"({type(error).__name__}: {error}). Nothing was loaded; to take the "
                "weights alone, export and import them"
            ) from error


def check_kind(where: str, saved: Any, own: Any, *, is_strict: bool = True) -> None:
    """Check that a saved value is of the same kind as one of this run.

    Args:
        where: the value's place, for the error.
        saved: the saved value.
        own: this run's value; its number does not matter.
        is_strict: whether dicts must have all keys, and tensors their shape and type.

    Raises:
        CheckpointError: the kinds differ.
    """
    for path, there, here in _differences(where, saved, own, is_strict=is_strict):
        raise CheckpointError(
            f"{path}: the checkpoint has {there}, where this run keeps {here}: the "
            "state is of another optimizer, schedule or scaler, or of another version. "
            "Nothing was loaded; to take the weights alone, export and import them"
        )


def _differences(
    path: str, saved: Any, own: Any, *, is_strict: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield each place where two values differ in kind, with both kinds."""
    if own is None or (saved is None and not is_strict):
        return
    if isinstance(own, dict) and isinstance(saved, dict):
        for key in own.keys() & saved.keys():
            yield from _differences(
                f"{path}/{key}", saved[key], own[key], is_strict=is_strict
            )
        missing = sorted(map(str, own.keys() - saved.keys()))
        if missing and is_strict:
            yield path, "nothing", ", ".join(missing)
        return
    if isinstance(own, list | tuple) and isinstance(saved, list | tuple):
        for i, (there, here) in enumerate(zip(saved, own, strict=False)):
            yield from _differences(f"{path}/{i}", there, here, is_strict=is_strict)
        return
    there, here = _kind(saved, is_strict), _kind(own, is_strict)
    if there != here:
        yield path, there, here


def _kind(value: Any, is_strict: bool) -> str:
    """Name a value's kind; of a tensor with elements, also its shape and type."""
    match value:
        case Tensor() if value.dim() and is_strict:
            return f"a tensor {value.dtype}{list(value.shape)}"
        case Tensor() if is_strict:
            return "a tensor of one number"
        case bool() | int() | float() | Tensor():
            return "a number"
        case list() | tuple():
            return "a list"
        case dict():
            return "a dict"
        case _:
            return f"a {type(value).__name__}"


def _decoded(value: Any, get_tensor: GetTensor, where: str) -> Any:
    try:
        return decode(value, get_tensor)
    except (TypeError, ValueError) as error:
        raise DamagedError(f"the state of {where} is not valid: {error}") from error


def _state_after_a_step(
    optimizer: torch.optim.Optimizer, options: list[Any]
) -> dict[int, Any]:
    """Return the state that an optimizer makes in a first step, by parameter's id.

    A copy of the optimizer takes the step, on parameters without data.

    Args:
        optimizer: the optimizer, which is not changed.
        options: the options of each group.

    Returns:
        As much of it as there is if the step needs numbers.
    """
    with contextlib.suppress(Exception):
        empty = {
            id(x): nn.Parameter(torch.empty_like(x, device="meta"))
            for group in optimizer.param_groups
            for x in group["params"]
        }
        stepped = object.__new__(type(optimizer))
        state: defaultdict[Any, Any] = defaultdict(dict)
        memo: dict[int, Any] = {id(optimizer): stepped, id(optimizer.state): state}
        stepped.__dict__.update(copy.deepcopy(optimizer.__dict__, {**memo, **empty}))
        stepped.__dict__.update({hooks: OrderedDict() for hooks in _HOOKS})
        for group, new in zip(stepped.param_groups, options, strict=True):
            group.update(copy.deepcopy(new))
        for parameter in empty.values():
            parameter.grad = torch.empty_like(parameter)
        with contextlib.suppress(Exception):
            type(stepped).step(stepped)
        return {key: state[x] for key, x in empty.items() if x in state}
    return {}
