"""Traces the optimizer's step of one unit's weights, with learning rates as inputs.

The operators change weights and states in place, as in eager mode. torch's optimizers
keep the count of steps as a tensor when they are traced: it is kept in float64, so that
they compute with it as with a number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.optim import optimizer as torch_optimizer

from hocket.errors import CaptureError
from hocket.model.capture.attribute_writes import COLLECTIONS, held, same
from hocket.run.stage.compiled.trace import make_mode
from hocket.run.weights.optimizer_check import refuse_without_gradients

# What torch's fused optimizers note of themselves in their first step.
_TORCHS_OWN: Final = {"_need_device_dtype_check_for_fused"}
_RATE: Final = "lr"
_COUNT: Final = "step"
_FUSED_ON_GPU: Final = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
_TENSORS: Final = "state", "param_groups", "step"  # what does not count as a number
_TRACED_WITH: Final = {"capturable": True, "foreach": True}

Optimizer: TypeAlias = torch.optim.Optimizer
Weights: TypeAlias = Mapping[str, nn.Parameter]
State: TypeAlias = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UpdateGraph:
    """The optimizer's step of some weights.

    Its inputs are weights, then their gradients, then states, then rates.

    Args:
        module: the graph, which returns nothing.
        names: the weights, in order.
        states: `(weight, key)` of each state that is a tensor, in order.
        groups: the number of the parameter group of each rate, in order.
    """

    module: fx.GraphModule
    names: tuple[str, ...]
    states: tuple[tuple[str, str], ...]
    groups: tuple[int, ...]


def rate_dtype(optimizer: Optimizer, group: int) -> torch.dtype:
    """Return the type of a parameter group's learning rate as an input."""
    own = optimizer.param_groups[group]
    is_on_gpu = own["params"][0].device.type == "cuda"
    # A GPU's fused kernels read the rate as a float.
    return torch.float32 if is_on_gpu and _is_fused(optimizer, own) else torch.float64


def _is_fused(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether a group's step is one kernel.

    On a GPU it is wherever there is one and nothing else is asked for: the step of each
    unit is an op of its own, and would launch some twenty kernels.
    """
    if group.get("fused") is not None or group.get("foreach"):
        return bool(group.get("fused"))
    is_on_gpu = all(x.device.type == "cuda" for x in group["params"])
    return is_on_gpu and type(optimizer) in _FUSED_ON_GPU


def states_after_first_step(optimizer: Optimizer, weights: Weights) -> dict[str, State]:
    """Return the states that an optimizer has after one step, without memory.

    Args:
        optimizer: has the settings; its own states play no part.
        weights: those that get a gradient, by name.

    Raises:
        CaptureError: the optimizer reads values of tensors.
    """
    if fault := hook_fault(optimizer):
        raise CaptureError(fault)
    mode = make_mode()
    with mode:
        fakes = {name: _like(weight) for name, weight in weights.items()}
        for fake in fakes.values():
            fake.grad = _like(fake)

    def stepped() -> Optimizer:
        none: dict[str, State] = {name: {} for name in weights}
        clone = _clone(optimizer, weights, fakes, none, None)
        clone.step()
        return clone

    clone = _run_on_fakes(optimizer, stepped, mode)
    for group in clone.param_groups:
        for fake in group["params"]:
            _convert_count(clone.state[fake], group, fake.device)
    return {name: dict(clone.state[fake]) for name, fake in fakes.items()}


class UpdateTracer:
    """Traces the optimizer's steps of all units; units of one form share a graph.

    Args:
        optimizer: made for all weights; it does not change.
        states: the states of each weight; tensors may be without memory.
    """

    def __init__(self, optimizer: Optimizer, states: Mapping[str, State]) -> None:
        self._optimizer, self._states = optimizer, states
        self._group_of = {
            id(weight): i
            for i, group in enumerate(optimizer.param_groups)
            for weight in group["params"]
        }
        self._known: dict[tuple[Any, ...], UpdateGraph] = {}

    def update(self, weights: Weights) -> UpdateGraph:
        """Return the graph of the step of some weights.

        Raises:
            CaptureError: the optimizer reads values of tensors, or replaces its states.
        """
        form = tuple(self._form_of(name, weight) for name, weight in weights.items())
        if form not in self._known:
            self._known[form] = trace_update(self._optimizer, weights, self._states)
            return self._known[form]
        names = tuple(_tensor_states(weights, self._states))
        return replace(self._known[form], names=tuple(weights), states=names)

    def _form_of(self, name: str, weight: nn.Parameter) -> tuple[Any, ...]:
        states = [
            (key, *_form(x)) if isinstance(x, Tensor) else (key, repr(x))
            for key, x in self._states[name].items()
        ]
        return self._group_of[id(weight)], *_form(weight), *states


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _tensor_states(
    weights: Weights, states: Mapping[str, State]
) -> Iterator[tuple[str, str]]:
    """Yield `(weight, key)` of each state that is a tensor."""
    for name in weights:
        for key, value in states[name].items():
            if isinstance(value, Tensor):
                yield name, key


def trace_update(
    optimizer: Optimizer, weights: Weights, states: Mapping[str, State]
) -> UpdateGraph:
    """Trace the step of an optimizer.

    Args:
        optimizer: made for the weights, and others; it does not change.
        weights: those to update, by name.
        states: the states of each weight; tensors may be without memory.

    Raises:
        CaptureError: the optimizer reads values of tensors, or replaces its states.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = make_mode()
    names = [*_tensor_states(weights, states)]
    groups = _groups_of(optimizer, weights)
    device = next(iter(weights.values())).device
    with mode:
        flat = [
            *map(_like, weights.values()),
            *map(_like, weights.values()),
            *(_like(states[name][key]) for name, key in names),
            *(
                torch.empty((), dtype=rate_dtype(optimizer, i), device=device)
                for i in groups
            ),
        ]

    def run(*flat: Tensor) -> tuple[()]:
        num = len(weights)
        new = dict(zip(weights, flat[:num], strict=True))
        for weight, gradient in zip(flat[:num], flat[num : 2 * num], strict=True):
            weight.grad = gradient
        own = {name: dict(states[name]) for name in weights}
        for (name, key), tensor in zip(names, flat[2 * num :], strict=False):
            own[name][key] = tensor
        before = {name: dict(state) for name, state in own.items()}
        rates = flat[2 * num + len(names) :]
        clone = _clone(optimizer, weights, new, own, rates)
        plain = _plain_values(clone)
        clone.step()
        for name, weight in new.items():
            _check_in_place(optimizer, before[name], clone.state[weight])
        _check_plain_values(optimizer, plain, _plain_values(clone))
        return ()

    module = _run_on_fakes(optimizer, lambda: make_fx(run)(*flat), mode)
    for node in reversed(module.graph.nodes):
        if node.op == "call_function" and "record_function" in str(node.target):
            module.graph.erase_node(node)
    return UpdateGraph(module, tuple(weights), tuple(names), tuple(groups))


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _run_on_fakes(optimizer: Optimizer, run: Callable[[], T], mode: Any) -> T:
    """Run an optimizer's step on tensors without memory."""
    try:
        # Then torch's optimizers take the way on which they read no values.
        compiling = patch("torch.compiler.is_compiling", return_value=True)
        with compiling, mode, torch.no_grad():
            return run()
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"the optimizer {type(optimizer).__name__} cannot be captured "
            f"({type(error).__name__}: {error}): use one whose step reads no values of "
            "tensors, such as torch.optim's SGD, Adam and AdamW"
        ) from error


def _groups_of(optimizer: Optimizer, weights: Weights) -> list[int]:
    ids = {id(weight) for weight in weights.values()}
    return [
        i
        for i, group in enumerate(optimizer.param_groups)
        if any(id(x) in ids for x in group["params"])
    ]


def _clone(
    optimizer: Optimizer,
    weights: Weights,
    new: Mapping[str, Tensor],
    states: Mapping[str, State],
    rates: Sequence[Tensor] | None,
) -> Optimizer:
    """Return an optimizer of other tensors, with the same settings.

    Args:
        optimizer: the optimizer.
        weights: some of its weights, by name.
        new: the tensors in their place.
        states: the states of these.
        rates: the learning rates of the weights' groups; the optimizer's if None.
    """
    clone = object.__new__(type(optimizer))
    own = {k: x for k, x in vars(optimizer).items() if k != "step"}
    vars(clone).update(
        {k: copy(x) if isinstance(x, COLLECTIONS) else x for k, x in own.items()}
    )
    by_id = {id(weights[name]): x for name, x in new.items()}
    groups = [optimizer.param_groups[i] for i in _groups_of(optimizer, weights)]
    clone.param_groups = [
        {
            **group,
            "params": [by_id[id(x)] for x in group["params"] if id(x) in by_id],
            **_settings(optimizer, group),
        }
        for group in groups
    ]
    for group, rate in zip(clone.param_groups, rates or (), strict=False):
        if _RATE in group:
            group[_RATE] = rate
    clone.state = defaultdict(dict, {new[name]: own for name, own in states.items()})
    return clone


def _settings(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, bool]:
    """Return the settings with which a group's step is traced."""
    if _is_fused(optimizer, group):
        return {"fused": True}
    return {key: value for key, value in _TRACED_WITH.items() if key in group}


def _convert_count(
    state: State, group: Mapping[str, Any], device: torch.device
) -> None:
    count = state.get(_COUNT)
    if isinstance(count, Tensor) and not group.get("fused"):
        state[_COUNT] = count.to(device, torch.float64)


def _check_in_place(optimizer: Optimizer, old: State, new: State) -> None:
    """Refuse states that are no tensors changed in place."""
    changed = [k for k in old.keys() | new.keys() if old.get(k) is not new.get(k)]
    if changed:
        raise CaptureError(
            f"the optimizer {type(optimizer).__name__} assigns a new value to its "
            f"state {min(changed)!r}: change it in place, as a tensor"
        )


def _plain_values(optimizer: Optimizer) -> dict[str, Any]:
    """Return the values that an optimizer keeps beside its states, by name."""
    own = {k: x for k, x in vars(optimizer).items() if k not in _TENSORS}
    for i, group in enumerate(optimizer.param_groups):
        options = {k: x for k, x in group.items() if k != "params"}
        own |= {f"param_groups[{i}][{k!r}]": x for k, x in options.items()}
    return {k: held(x) for k, x in own.items()}


def _check_plain_values(
    optimizer: Optimizer, old: Mapping[str, Any], new: Mapping[str, Any]
) -> None:
    """Refuse a step that changes numbers: a graph would repeat the first one's."""
    names = (old.keys() | new.keys()) - _TORCHS_OWN
    changed = [k for k in names if not same(old.get(k), new.get(k))]
    if changed:
        name = min(changed)
        raise CaptureError(
            f"a step of the optimizer {type(optimizer).__name__} changes its {name} "
            f"from {old.get(name)} to {new.get(name)}: keep what changes in tensors of "
            "its state, changed in place"
        )


def hook_fault(optimizer: Optimizer) -> str:
    """Return why an optimizer's own step does not run alone; empty if it does."""
    hooks = (
        *(torch_optimizer._global_optimizer_pre_hooks.values()),
        *(torch_optimizer._global_optimizer_post_hooks.values()),
        *(optimizer._optimizer_step_pre_hooks.values()),
        *(optimizer._optimizer_step_post_hooks.values()),
    )
    kind = type(optimizer).__name__
    seen = [x for x in hooks if x is not refuse_without_gradients]
    if seen:
        return f"the optimizer {kind} has a hook on its step: {seen[0]!r}"
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return f"the optimizer {kind} has a step of its own, {step!r}"
    known = getattr(optimizer.zero_grad, "__func__", None)
    is_own = known is not Optimizer.zero_grad
    return f"the optimizer {kind} has a zero_grad() of its own" if is_own else ""
