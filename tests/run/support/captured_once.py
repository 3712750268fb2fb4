"""Models that several runs of a job begin with: made once, and captured once.

To capture a model takes longer than to train it for twenty steps, in tests of small
models by far. What one capture is good for: every cut, every order, every number of
steps; only the example's form must be the same.

What is kept ready in a process is there in all workers that are forked from it.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.model.capture.capture import Captured, capture


class Shelf:
    """Gives each model back as it was when it was made."""

    def __init__(self) -> None:
        self._models: dict[str, tuple[nn.Module, dict[str, Tensor]]] = {}

    def with_more(self) -> Shelf:
        """Another one, on which there are the same models to begin with."""
        shelf = Shelf()
        shelf._models = dict(self._models)
        return shelf

    def model(self, name: str, make: Callable[[], nn.Module]) -> nn.Module:
        """The model of a name, in training, with its first weights and no gradients.

        Args:
            name: the model's name.
            make: makes it, the first time.
        """
        if name not in self._models:
            model = make()
            self._models[name] = model, copy.deepcopy(model.state_dict())
        model, start = self._models[name]
        model.load_state_dict(start)
        model.train().zero_grad(set_to_none=True)
        # Captures stay, so that collecting garbage need not visit them each time.
        gc.freeze()
        return model


class Once:
    """Captures a model once for all examples of one form."""

    def __init__(self) -> None:
        self._found: dict[tuple[nn.Module, str], Captured] = {}

    def with_more(self) -> Once:
        """Another one, which begins with the same captures."""
        once = Once()
        once._found = dict(self._found)
        return once

    def __call__(
        self, model: nn.Module, args: Any, kwargs: Any = None, **more: Any
    ) -> Captured:
        """As `capture`."""
        form = pytree.tree_map_only(Tensor, _form, (args, kwargs))
        key = (model, str((form, more.get("cut") or ())))
        if key not in self._found:
            self._found[key] = capture(model, args, kwargs, **more)
        return self._found[key]


_SHELF: Final = Shelf()
_ONCE: Final = Once()


def keep_ready(
    name: str, make: Callable[[], nn.Module], args: Any, kwargs: Any
) -> None:
    """Capture a model before any worker needs it.

    Args:
        name: of the model on the shelf.
        make: makes it.
        args: of its forward.
        kwargs: the same.
    """
    _ONCE(_SHELF.model(name, make), args, kwargs)


@contextmanager
def captured_once() -> Iterator[Shelf]:
    """Let pipelines and the emulator share captures of models from the shelf."""
    with pytest.MonkeyPatch.context() as patch:
        once = _ONCE.with_more()
        patch.setattr("hocket.run.tune.cut.profiled_model.capture", once)
        patch.setattr("hocket.run.tune.teachers.joint.capture", once)
        patch.setattr("hocket.run.engine.emulator.net.capture", once)
        yield _SHELF.with_more()


def _form(x: Tensor) -> str:
    return f"{x.dtype}{tuple(x.shape)}"
