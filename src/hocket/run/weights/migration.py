"""Moves a parameter's optimizer state with it to another worker.

before   optimizer of {a, b, c}                  each parameter takes its state, its
after    optimizer of {a, b}, optimizer of {c}   average and its group's options

A parameter that was frozen has no state: it begins with zero moments, in its group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from hocket.errors import ConfigError
from hocket.run.comm.bundles import Bundle
from hocket.run.weights.settings import members
from hocket.run.weights.updater import Updater

_STATE = "state."  # before the names of what an optimizer keeps
_AVERAGE = "ema"
# What a schedule changes in a group; other numbers that change count something.
_SCHEDULED: Final = frozenset(
    {
        *("lr", "initial_lr", "max_lr", "min_lr", "weight_decay"),
        *("momentum", "max_momentum", "base_momentum"),
    }
)


def bundle_of(
    name: str, tensor: Tensor, updater: Updater | None, *, is_frozen: bool = False
) -> Bundle:
    """Return a parameter or buffer with the state of its updates.

    Args:
        name: its first name in the uncut model.
        tensor: its present value.
        updater: the parameter's updater; None for a buffer, or if it is not trained.
        is_frozen: whether the parameter is not updated any more: of the state, only
            its average is kept.

    Raises:
        ConfigError: the optimizer keeps something else than tensors and plain numbers.
    """
    tensors = {"value": tensor.detach()}
    facts: dict[str, Any] = {
        "is_parameter": isinstance(tensor, nn.Parameter),
        "requires_grad": tensor.requires_grad,
    }
    if updater is not None and updater.ema is not None and name in updater.ema:
        tensors[_AVERAGE] = updater.ema[name]
    if is_frozen:
        return Bundle(tensors, facts)
    optimizer = None if updater is None else updater.optimizer
    group = None if optimizer is None else _group_of(optimizer, tensor)
    if updater is None or optimizer is None or group is None:
        return Bundle(tensors, facts)
    facts["options"] = {
        key: _plain(name, key, value) for key, value in group.items() if key != "params"
    }
    kept = optimizer.state.get(tensor, {}).items()
    tensors |= {_STATE + key: x for key, x in kept if isinstance(x, Tensor)}
    facts["state"] = {
        key: _plain(name, key, x) for key, x in kept if not isinstance(x, Tensor)
    }
    return Bundle(tensors, facts)


def tensor_in(bundle: Bundle) -> Tensor:
    """Return the parameter or buffer in a bundle."""
    value = bundle.tensors["value"]
    if not bundle.facts["is_parameter"]:
        return value
    return nn.Parameter(value, bundle.facts["requires_grad"])


@dataclass(frozen=True, slots=True)
class CommonState:
    """What the updates of a net have in common on all workers.

    Args:
        groups: the options of each group of the optimizer.
        schedule: the state of the learning-rate schedule; None without one.
    """

    groups: Sequence[Mapping[str, Any]]
    schedule: dict[str, Any] | None

    @classmethod
    def of(cls, updaters: Iterable[Updater]) -> CommonState | None:
        """Return that of the first updater that has an optimizer; None if none has."""
        for updater in updaters:
            if updater.optimizer is not None:
                groups = [
                    {key: _number(x) for key, x in group.items() if key != "params"}
                    for group in updater.optimizer.param_groups
                ]
                made = updater.scheduler
                return cls(groups, None if made is None else made.state_dict())
        return None


def restore_updater(
    updater: Updater, bundles: Mapping[str, Bundle], before: CommonState | None
) -> None:
    """Load the state of its parameters' updates into a new updater.

    Args:
        updater: the new updater.
        bundles: the bundle of each of its parameters, by name.
        before: the state before the cut, for the learning-rate schedule, and for groups
            of which all parameters were frozen.

    Raises:
        ConfigError: the parameters of a group had different options; an optimizer had
            one that this one leaves out; or there is a schedule here, and was none
            before or one of other groups.
    """
    here = members(updater.optimizer)
    for name, parameter in updater.parameters.items():
        if "options" in bundles[name].facts and id(parameter) not in here:
            raise ConfigError(
                f"the optimizer had {name} before the cut, and optimizer= leaves it "
                "out of the new one: choose parameters by name (parameters.named())"
            )
    if updater.optimizer is not None:
        groups = () if before is None else before.groups
        _restore_optimizer(updater.optimizer, updater.parameters, bundles, groups)
    for name, average in (updater.ema or {}).items():
        average.copy_(bundles[name].tensors[_AVERAGE])
    updater.scheduled_rates = updater.rates()
    if updater.scheduler is None or updater.optimizer is None:
        return
    schedule = None if before is None else before.schedule
    num_before = 0 if before is None else len(before.groups)
    if schedule is None or num_before != len(updater.optimizer.param_groups):
        raise ConfigError(
            "a worker has a learning-rate schedule after the cut, and had none before, "
            "or one of other groups: let the optimizer make the same groups of any "
            "parameters"
        )
    updater.scheduler.load_state_dict(schedule)


def _restore_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    bundles: Mapping[str, Bundle],
    before: Sequence[Mapping[str, Any]],
) -> None:
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    has_same_groups = len(before) == len(optimizer.param_groups)
    for number, group in enumerate(optimizer.param_groups):
        names = [name_of[id(parameter)] for parameter in group["params"]]
        known = [name for name in names if "options" in bundles[name].facts]
        options = [_tupled(bundles[name].facts["options"]) for name in known]
        for name, other in zip(known, options, strict=True):
            if other != options[0]:
                raise ConfigError(
                    f"{known[0]} and {name} are in one group of the optimizer, but had "
                    "different options on the workers that they come from: let the "
                    "optimizer group parameters by name, not by stage"
                )
        fresh = [x for x in names if x not in known and parameters[x].requires_grad]
        kept = options[0] if options else before[number] if has_same_groups else {}
        if fresh:
            _refuse_counted(group, kept, fresh[0])
        for name in known:
            state = _state_in(bundles[name])
            if state:
                optimizer.state[parameters[name]] = state
        _set_options(group, kept)


def _refuse_counted(
    group: Mapping[str, Any], kept: Mapping[str, Any], name: str
) -> None:
    """Refuse to train a layer again in a group that counts its steps for all.

    Raises:
        ConfigError: the group's count corrects moments that begin with zeros.
    """
    for key, value in kept.items():
        is_count = isinstance(value, int | float) and key not in _SCHEDULED
        if is_count and value != _number(group.get(key)):
            raise ConfigError(
                f"{name} trains again, with moments of nothing, and its optimizer "
                f"counts in the group ({key!r} is {value}, and {group.get(key)} in a "
                "new one): its first updates would be many times too long. Take an "
                "optimizer that counts for each parameter, or a policy that only "
                "freezes"
            )


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set a group's options; a learning rate that is a tensor stays the same tensor."""
    for key, value in options.items():
        own = group.get(key)
        group[key] = own.fill_(value) if isinstance(own, Tensor) else value


def _state_in(bundle: Bundle) -> dict[str, Any]:
    """Return a parameter's optimizer state."""
    tensors = {
        key.removeprefix(_STATE): value
        for key, value in bundle.tensors.items()
        if key.startswith(_STATE)
    }
    return {**bundle.facts["state"], **tensors}


def _group_of(
    optimizer: torch.optim.Optimizer, tensor: Tensor
) -> Mapping[str, Any] | None:
    for group in optimizer.param_groups:
        if any(parameter is tensor for parameter in group["params"]):
            return group
    return None


def _plain(name: str, key: str, value: Any) -> Any:
    """Return a number, a word, or several of them, as JSON holds them."""
    value = _number(value)
    if isinstance(value, tuple | list):
        return [_plain(name, key, x) for x in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"the optimizer of {name} keeps {key}, a {type(value).__name__}, which cannot "
        "be sent to another worker: keep tensors, numbers and words"
    )


def _number(value: Any) -> Any:
    """Return the number of a tensor such as a learning rate; all else as it is."""
    is_one = isinstance(value, Tensor) and value.numel() == 1
    return value.item() if is_one else value


def _tupled(options: Mapping[str, Any]) -> dict[str, Any]:
    """Turn lists back into the tuples that they were (betas)."""
    return {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in options.items()
    }
