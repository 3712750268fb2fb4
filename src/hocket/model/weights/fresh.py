"""Draws fresh weights, each module by its own initializer, seeded by its name.

What a module draws depends on the seed and on its path alone: not on the cut, nor on
what else a worker draws. In order, as constructors do it: parts before the whole, and
`reset_parameters()` before the `_init_weights(module)` of a model around it.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn

from hocket.errors import ConfigError, ModelError
from hocket.model.trace.state import State, overwrite

Like: TypeAlias = Callable[[], nn.Module] | Literal["eager"]

_NUM_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class FreshWeights:
    """Weights that are drawn afresh; see `init`.

    Args:
        seed: the seed of all.
        like: makes the model whose weights are taken, or "eager".
    """

    seed: int
    _: KW_ONLY
    like: Like | None = None
    _drawn: list[nn.Module] = field(default_factory=list, repr=False, compare=False)

    def fill(
        self, model: nn.Module, wanted: Mapping[str, Tensor], own: Collection[str]
    ) -> None:
        """Draw tensors of a model in place.

        Args:
            model: the model.
            wanted: its tensors, by first name.
            own: those that have values of the user's.

        Raises:
            ModelError: some stay unset, or the model that `like` makes has others.
        """
        if self.like is None:
            refuse_unset(draw(model, wanted, self.seed, own), model, by_all=True)
            return
        drawn = State.of(self._eager(model))
        for name, tensor in wanted.items():
            value = drawn.tensors.get(drawn.first_name.get(name, ""))
            if value is None or value.shape != tensor.shape or value.is_meta:
                there = "none" if value is None else f"{tuple(value.shape)}"
                there = "meta" if value is not None and value.is_meta else there
                raise ModelError(
                    f"hocket.init(like=...) makes a model whose {name} is {there}, and "
                    f"this one's is {tuple(tensor.shape)}: it must make the same model "
                    'as yours, outside of torch.device("meta")'
                )
            overwrite(tensor, value.detach())

    def forget(self) -> None:
        """Let go of the model that `like` has made."""
        self._drawn.clear()

    def _eager(self, model: nn.Module) -> nn.Module:
        """Return the model that the plain constructor makes."""
        if not self._drawn:
            with torch.random.fork_rng([]), torch.device("cpu"):
                torch.manual_seed(self.seed)
                if callable(self.like):
                    made = self.like()
                else:
                    config: Any = getattr(model, "config", None)
                    if not hasattr(config, "to_json_string"):
                        raise ConfigError(
                            'hocket.init(like="eager") makes models of the '
                            "transformers library again from their config, and a "
                            f"{type(model).__name__} has none: give the function that "
                            f"makes it, like=lambda: {type(model).__name__}(...)"
                        )
                    made = type(model)(config)
            if not isinstance(made, nn.Module):
                raise ConfigError(
                    "hocket.init(like=...) must be a function that makes the model; it "
                    f"returned {type(made).__name__}"
                )
            self._drawn.append(made)
        return self._drawn[0]


def init(seed: int = 0, *, like: Like | None = None) -> FreshWeights:
    """Fresh weights for a model on the meta device, `Pipeline(..., weights=init())`.

    Each module's own `reset_parameters()` draws them, and then `_init_weights(module)`
    of the model around it, as those of the transformers library have. They depend on
    the seed and on the module's name alone: not on the number of workers or the cut.

    Args:
        seed: the seed of all.
        like: "eager" gives the very numbers that `torch.manual_seed(seed)` and the
            plain constructor give, for models of the transformers library; for any
            other give a function that makes it, `like=lambda: Net(...)`. Each worker
            makes the whole model for that, and keeps its own stages.

    Raises:
        ConfigError: the seed is no number, or `like` is neither.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"hocket.init(seed={seed!r}): the seed is a whole number")
    if like is not None and like != "eager" and not callable(like):
        raise ConfigError(
            f'hocket.init(like={like!r}): "eager", or a function that makes the model'
        )
    return FreshWeights(seed, like=like)


def draw(
    model: nn.Module,
    wanted: Mapping[str, Tensor],
    seed: int,
    own: Collection[str],
    only: Collection[str] | None = None,
) -> list[str]:
    """Let modules initialize tensors in place; return the names that none has set.

    They may initialize others beside these: the caller knows what to do with them. A
    tied weight is drawn by the module of its first name.

    Args:
        model: the model.
        wanted: its tensors, by first name.
        seed: the seed of all.
        own: first names of those that have values of the user's, and keep them.
        only: the paths of the modules to run; all that have some of `wanted`, or have
            parts that do, when not given.
    """
    state = State.of(model)
    for x in wanted.values():
        overwrite(x, _unset(x))
    paths = [
        path for path in _parts_first(model) if _reaches(state, path, wanted, only)
    ]
    with torch.random.fork_rng([]), torch.no_grad():
        for path in paths:
            _initialize(model, path, state, seed, own)
        flags = {name: x.clone() for name, x in wanted.items() if x.dtype == torch.bool}
        for name in flags:  # a flag that is set stays, whatever it was before
            overwrite(wanted[name], torch.ones_like(flags[name]))
        for path in paths if flags else ():
            _initialize(model, path, state, seed, own)
    return [name for name, x in wanted.items() if not _is_set(x, flags.get(name))]


def refuse_unset(names: Collection[str], model: nn.Module, *, by_all: bool) -> None:
    """Refuse tensors that have no values.

    Args:
        names: those that nothing has set.
        model: the model.
        by_all: whether all of its weights are drawn; or the files lack them.

    Raises:
        ModelError: there are some; names them, and what to do.
    """
    if not names:
        return
    owners = (type(model.get_submodule(x.rpartition(".")[0])).__name__ for x in names)
    shown = [f"{x} (of a {y})" for x, y in zip(names, owners, strict=True)][:_NUM_SHOWN]
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    what = "no initializer sets" if by_all else "neither the files nor a module set"
    eager = ", or hocket.init(seed, like=...)" if by_all else ""
    raise ModelError(
        f"{what} {', '.join(shown)}{more}: on the meta device a constructor computes "
        "no values. Give the module a `reset_parameters()` that sets them, or make it "
        f'under `with torch.device("cpu")`{eager}'
    )


def _parts_first(model: nn.Module) -> Iterator[str]:
    """Yield the paths of all modules, those of parts before the whole's."""
    seen = set[nn.Module]()

    def below(module: nn.Module, path: str) -> Iterator[str]:
        if module in seen:
            return
        seen.add(module)
        for name, part in module.named_children():
            yield from below(part, f"{path}.{name}" if path else name)
        yield path

    yield from below(model, "")


def _reaches(
    state: State, path: str, wanted: Collection[str], only: Collection[str] | None
) -> bool:
    if only is not None:
        return path in only
    return any(name in wanted for name in state.below(path))


def _initialize(
    model: nn.Module, path: str, state: State, seed: int, own: Collection[str]
) -> None:
    """Run a module's own initializers; weights of another's, or the user's, stay."""
    module = model.get_submodule(path)
    prefix = f"{path}." if path else ""
    direct = map(prefix.__add__, (*module._parameters, *module._buffers))
    names = [x for x in direct if x in state.first_name]
    kept = [first for x in names if (first := state.first_name[x]) != x]
    kept += [x for x in state.below(path) if x in own]
    before = {name: state.tensors[name].detach().clone() for name in kept}
    torch.manual_seed(zlib.crc32(f"{seed} {path}".encode()))
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
    outer = _whole_around(model, path)
    if outer is not None:
        outer._init_weights(module)
    elif isinstance(module, nn.MultiheadAttention):
        module._reset_parameters()
    for name, value in before.items():
        overwrite(state.tensors[name], value)


def _whole_around(model: nn.Module, path: str) -> Any:
    """Return the innermost whole around a module that initializes its parts.

    By `_init_weights(module)`, which models of the transformers library have, and many
    others give to `apply`.
    """
    while True:
        found = model.get_submodule(path)
        own = getattr(type(found), "_init_weights", None)
        if own is not None and _num_needed(own) == 2:  # itself and the part
            return found
        if not path:
            return None
        path = path.rpartition(".")[0]


def _num_needed(function: Any) -> int:
    """Return how many arguments a function must be given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 0
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(x.default is x.empty for x in parameters if x.kind in named)


def _unset(tensor: Tensor) -> Tensor:
    """Return values that nothing sets."""
    kind = tensor.dtype
    if kind.is_floating_point or kind.is_complex:
        return torch.tensor(math.nan, dtype=torch.float32).to(kind).expand(tensor.shape)
    least = False if kind == torch.bool else torch.iinfo(kind).min
    # Of unsigned numbers zero is one that is set: the largest is not.
    least = torch.iinfo(kind).max if least == 0 and kind != torch.bool else least
    return torch.tensor(least, dtype=kind).expand(tensor.shape)


def _is_set(tensor: Tensor, before: Tensor | None) -> bool:
    if before is not None:
        return torch.equal(tensor, before)
    kind = tensor.dtype
    if kind.is_floating_point or kind.is_complex:
        whole = tensor.float() if kind.itemsize == 1 else tensor
        return not bool(whole.isnan().any())
    return not bool((tensor == _unset(tensor)).any())
