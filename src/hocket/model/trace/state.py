"""A model's parameters and buffers by name, tied ones under all of their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hocket.errors import ConfigError, ModelError
from hocket.model.trace.local import is_sharded, local
from hocket.model.trace.reached import read_beside


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers under all of their names, parameters first."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@dataclass(frozen=True, slots=True)
class State:
    """Every parameter and buffer of a model, under the first of its names.

    Args:
        tensors: the tensors by name; parameters first, both in the model's own order.
        names: every name of a tensor, by its first name. Tied tensors have several.
        first_name: the first name, by any name.
        persistent: the names that `state_dict()` has.
        beside: the first names of what a module reads that is another one's, by the
            module's path.
    """

    tensors: Mapping[str, Tensor]
    names: Mapping[str, tuple[str, ...]]
    first_name: Mapping[str, str]
    persistent: frozenset[str]
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> State:
        """Read the names from the model.

        Raises:
            ModelError: it is no module that can be captured: lazy, or scripted.
        """
        if fault := model_fault(model, parallel=True):
            raise ModelError(fault)
        every = named_tensors(model)
        first_of: dict[int, str] = {}
        for name, tensor in every.items():
            first_of.setdefault(id(tensor), name)
        first_name = {name: first_of[id(tensor)] for name, tensor in every.items()}
        names: dict[str, tuple[str, ...]] = {}
        for name, first in first_name.items():
            names[first] = (*names.get(first, ()), name)
        tensors = {first: every[first] for first in names}
        persistent = frozenset(every) - _left_out_of_state_dict(model)
        found = read_beside(model)
        beside = {x: tuple(first_of[id(t)] for t in ts) for x, ts in found.items()}
        return cls(tensors, names, first_name, persistent, beside)

    def joined(self, name: str, other: State) -> State:
        """Return it with another module's state, under `name` and a dot."""
        begin = f"{name}.".__add__
        names = {begin(x): tuple(map(begin, same)) for x, same in other.names.items()}
        firsts = {begin(x): begin(first) for x, first in other.first_name.items()}
        return State(
            {**self.tensors, **{begin(x): y for x, y in other.tensors.items()}},
            {**self.names, **names},
            {**self.first_name, **firsts},
            self.persistent.union(map(begin, other.persistent)),
            self.beside,
        )

    @property
    def trained(self) -> dict[str, Tensor]:
        """The tensors that want a gradient, by name."""
        return {name: x for name, x in self.tensors.items() if x.requires_grad}

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The first names of all parameters, in their order."""
        return tuple(filter(self.is_parameter, self.tensors))

    def is_parameter(self, name: str) -> bool:
        """Return whether a name is a parameter's rather than a buffer's."""
        return isinstance(self.tensors[self.first_name[name]], nn.Parameter)

    def below(self, path: str) -> tuple[str, ...]:
        """Return the first names of all tensors that the module at `path` reads."""
        prefix = f"{path}." if path else ""
        names = self.first_name.items()
        found = [first for name, first in names if name.startswith(prefix)]
        for inner, beside in self.beside.items():
            found += beside if f"{inner}.".startswith(prefix) else ()
        return tuple(dict.fromkeys(found))


def saved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers under all names; no hook is called."""
    state = State.of(module)
    found = state.first_name.items()
    return {k: state.tensors[first] for k, first in found if k in state.persistent}


def home_of(model: nn.Module) -> torch.device | None:
    """Return the device of a model's values; None if there are none or several."""
    tensors = (*model.parameters(), *model.buffers())
    # Numbers may be anywhere.
    homes = {x.device for x in tensors if x.dim() and not x.is_meta}
    return homes.pop() if len(homes) == 1 else None


def overwrite(tensor: Tensor, value: Tensor) -> None:
    """Write a value in place; of an expanded tensor, each element once."""
    target = tensor.detach()
    for dim, (size, stride) in enumerate(
        zip(tensor.shape, tensor.stride(), strict=True)
    ):
        if size > 1 and not stride:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    target.copy_(value)


def _left_out_of_state_dict(model: nn.Module) -> frozenset[str]:
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    )


def refuse_no_values(net: nn.Module, what: str, way_out: str) -> None:
    """Refuse a net whose weights have no values here.

    Args:
        net: the net.
        what: its name, for the error.
        way_out: what to do where it is on meta; ends the sentence.

    Raises:
        ConfigError: parameters or buffers are on the meta device, or parameters are in
            the shards of a pipeline, which has released them; names the first.
    """
    every = (*net.named_parameters(), *net.named_buffers())
    if name := next((name for name, x in every if x.is_meta), ""):
        raise ConfigError(
            f"{what}'s {name} is on the meta device, so it has no weights: {way_out} "
            '(made outside of `torch.device("meta")` it has some; `to_empty` would '
            "untie shared weights, and leave buffers and what no initializer sets "
            "undefined)"
        )
    for name, weight in net.named_parameters():
        is_one = weight.dim() and weight.numel() and not any(weight.stride())
        if is_one and weight.flatten()[0].isnan():
            raise ConfigError(
                f"{what}'s {name} has no values here: they are in the shards of "
                "another pipeline (num_shards). Give a model made in the same way, "
                "into which `gather_into` of that pipeline has copied them"
            )


def gradient_type(parameter: Tensor) -> torch.dtype:
    """Return the type that a parameter's gradients add up in."""
    return parameter.grad_dtype or parameter.dtype


def gradient_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's gradient; 0 if it wants none."""
    return local(tensor).numel() * gradient_type(tensor).itemsize * tensor.requires_grad


def model_fault(model: object, *, parallel: bool = False) -> str | None:
    """Return what is wrong with a model; None or nothing if it can be captured.

    Args:
        model: the model.
        parallel: whether it may be parallelised over a tp axis.
    """
    if isinstance(model, torch.jit.ScriptModule):
        return (
            "model is a scripted module (torch.jit), whose code is not Python's: give "
            "the module that it was made from"
        )
    if isinstance(model, nn.Module):
        return _tensor_fault(model, parallel=parallel)
    if isinstance(model, type):
        return f"model is the class {model.__name__}: give a module, an object of it"
    return f"model must be a torch.nn.Module; got {type(model).__name__} {model!r:.60}"


def refuse_faults(models: Iterable[object]) -> None:
    """Refuse models that only `Pipeline` takes, or nothing does.

    Raises:
        ModelError: one is such; says what to do.
    """
    for fault in filter(None, map(model_fault, models)):
        raise ModelError(fault)


def _tensor_fault(model: nn.Module, *, parallel: bool) -> str:
    """Return what is wrong with a model's parameters and buffers; nothing if all do."""
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(x):
            return (
                f"the model's {name} has no shape yet (a lazy module): call the model "
                "once, `model(*inputs)`, before it is given"
            )
        if is_sharded(x) and not parallel:
            return (
                f"the model's {name} is a DTensor, as `parallelize_module`, a tp_plan "
                "and `fully_shard` make them, and only hocket.Pipeline takes a model "
                "with such: give the model as it was before"
            )
    return ""
