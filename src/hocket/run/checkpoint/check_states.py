"""Checks that saved state is of the kind that this run's optimizers keep.

All of it is decoded and compared before anything changes: a state that an optimizer
cannot use would otherwise end the run in the middle of its next update.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from hocket.errors import CheckpointError, DamagedError
from hocket.run.checkpoint.regroup import RegroupedUpdates
from hocket.run.cluster.store.values import decode
from hocket.run.weights.updater import Updater

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
            "the learning-rate schedule",
            saved,
            scheduler.state_dict(),
            is_strict=False,
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
