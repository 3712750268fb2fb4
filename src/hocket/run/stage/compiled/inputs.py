"""The tensors that a stage's code computes with, as one list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from hocket.errors import ModelError
from hocket.model.stages.emit import Code
from hocket.model.stages.parameter_paths import Home


@dataclass(frozen=True, slots=True)
class Inputs:
    """The sources of the tensors that a stage computes with.

    Args:
        args: the places of tensors among the arguments of the stage's code.
        objects: the names of tensors among the code's objects.
        homes: the dicts and keys of tensors that are no arguments, in modules that run
            as they are.
    """

    args: tuple[int, ...]
    objects: tuple[str, ...]
    homes: tuple[Home, ...]

    def tensors(self, code: Code, args: Sequence[Any]) -> list[Tensor]:
        """Return all tensors, in order."""
        found = [args[i] for i in self.args]
        if self.objects:
            found += [getattr(code.objects, name) for name in self.objects]
        if self.homes:
            found += [home[key] for home, key in self.homes]
        return found

    @contextmanager
    def replaced(
        self, code: Code, args: Sequence[Any], tensors: Sequence[Tensor]
    ) -> Iterator[Callable[[torch.device], Any]]:
        """Call the stage's code with other tensors in the place of these.

        Args:
            code: the stage's code.
            args: the arguments; those that are no tensors are used as they are.
            tensors: the other tensors, in order.

        Yields:
            The call; the modules' own tensors are away meanwhile.

        Raises:
            ModelError: a module has assigned a tensor to one of its buffers.
        """
        rest = iter(tensors)
        own = list(args)
        for i in self.args:
            own[i] = next(rest)
        objects = SimpleNamespace(**vars(code.objects))
        for name in self.objects:
            setattr(objects, name, next(rest))
        new = {id(home[key]): next(rest) for home, key in self.homes}
        new |= {id(args[i]): own[i] for i in self.args}
        with _swapped(modules_of(code), new):
            yield lambda device: code.function(objects, device, *own)


def inputs_of(code: Code, args: Sequence[Any]) -> Inputs:
    """Find all tensors that a call of the code computes with."""
    places = tuple(i for i, x in enumerate(args) if isinstance(x, Tensor))
    objects = vars(code.objects).items()
    names = tuple(name for name, x in objects if isinstance(x, Tensor))
    seen = {id(args[i]) for i in places}
    homes: list[Home] = []
    for module in modules_of(code):
        for home in _homes(module):
            for key, value in home.items():
                if value is not None and id(value) not in seen:
                    seen.add(id(value))
                    homes.append((home, key))
    return Inputs(places, names, tuple(homes))


def modules_of(code: Code) -> list[nn.Module]:
    """Return the modules that a stage runs as they are, with all inside them."""
    found = [x for x in vars(code.objects).values() if isinstance(x, nn.Module)]
    return list(dict.fromkeys(inner for x in found for inner in x.modules()))


def _homes(module: nn.Module) -> list[dict[str, Any]]:
    homes = module._parameters, module._buffers
    return [cast("dict[str, Any]", home) for home in homes]


@contextmanager
def _swapped(modules: Sequence[nn.Module], new: dict[int, Tensor]) -> Iterator[None]:
    """Replace the tensors that modules keep, under all names of each."""
    kept = [(home, dict(home)) for module in modules for home in _homes(module)]
    meanwhile = [
        {key: new.get(id(x), x) for key, x in before.items()} for _, before in kept
    ]
    for (home, _), those in zip(kept, meanwhile, strict=True):
        home.update(those)
    try:
        yield
        for (home, _), those in zip(kept, meanwhile, strict=True):
            _check_same(home, those)
    finally:
        for home, before in kept:
            home.clear()
            home.update(before)


def _check_same(home: dict[str, Any], before: dict[str, Any]) -> None:
    for key in home.keys() | before.keys():
        if home.get(key) is not before.get(key):
            raise ModelError(
                f"a module assigns a new tensor to {key!r}, which a graph would not do "
                f"again: change it in place (self.{key}.copy_(...))"
            )
