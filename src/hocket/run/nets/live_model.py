"""A user's model, as it is while training runs: captured again without its values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any
from weakref import ref

import torch
from torch import nn

from hocket.errors import ModelError
from hocket.model.capture.capture import capture
from hocket.model.capture.captured import Captured
from hocket.model.stages.outline import aliased, copied, on_meta
from hocket.model.trace.example import Example
from hocket.model.trace.observe import in_mode
from hocket.model.trace.state import State, home_of


class LiveModel:
    """The model that a net was captured from; its user may let it go.

    Args:
        model: the model, in the mode that it is trained in.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)
        modules = model.named_modules()
        self._evaluated = [path for path, x in modules if path and not x.training]
        # If not, as teachers are, its training was captured with all parts in training.
        self._was_training = model.training
        self._modes: list[tuple[nn.Module, bool]] = []  # while it evaluates

    @property
    def model(self) -> nn.Module | None:
        """The model; None if it is gone."""
        return self._model()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put it into evaluation mode while the block runs."""
        model = self.model
        modules = [] if model is None else model.modules()
        self._modes = [(module, module.training) for module in modules]
        try:
            with nullcontext() if model is None else in_mode(model, training=False):
                yield
        finally:
            self._modes.clear()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Give it the modes that its user has set, also within `evaluating`."""
        for module, mode in self._modes:
            module.training = mode
        try:
            yield
        finally:
            for module, _ in self._modes:
                module.training = False

    def number(self, name: str) -> float | None:
        """Return an attribute by its full name, if it is a float."""
        path, _, attribute = name.rpartition(".")
        model = self.model
        part = None if model is None else dict(model.named_modules()).get(path)
        # What its class has, too, would be read there and not from a buffer.
        is_own = part is not None and not hasattr(type(part), attribute)
        value = vars(part).get(attribute) if is_own else None
        return value if type(value) is float else None

    def captured(
        self,
        numbers: Collection[str],
        example: Example,
        trained: Collection[str],
    ) -> Captured:
        """Capture it as it is now.

        Args:
            numbers: attributes to capture as tensors, by their full names.
            example: the microbatch, and which of its dimensions are open.
            trained: the parameters that want a gradient.

        Raises:
            ModelError: it is gone, or cannot be captured.
        """
        model = self.model
        if model is None:
            raise ModelError("it is gone: keep the model in a variable")
        tensors = State.of(model).tensors.values()
        # Operators choose other kernels on `meta`, whose outputs have other strides.
        home = None if any(x.is_meta for x in tensors) else home_of(model)
        placed = on_meta
        if home is not None:
            placed = aliased
            example = example.mapped(lambda x: torch.zeros_like(x, device=home))
        copy = copied(model, {id(x): placed(x) for x in tensors})
        for name in numbers:
            path, _, attribute = name.rpartition(".")
            part = copy.get_submodule(path)
            value = torch.tensor(getattr(part, attribute), dtype=torch.float64)
            delattr(part, attribute)
            value = value.to("meta" if home is None else home)
            part.register_buffer(attribute, value, persistent=False)
        for name, parameter in copy.named_parameters():
            parameter.requires_grad_(name in trained)  # so are messages
        if not copy.training and self._was_training:
            _evaluate_root(copy, self._evaluated)
        args, kwargs = example.call(marked=True)
        return capture(copy, args, kwargs, lengths=example.open)


def _evaluate_root(model: nn.Module, evaluated: Sequence[str]) -> None:
    """Let the root's own code see evaluation mode in a capture of its training.

    Its parts are captured in training mode, but for those that were evaluated, as at
    first: where their modes have changed, they run as they are.
    """
    forward = model.forward

    @wraps(forward)
    def evaluating(*args: Any, **kwargs: Any) -> Any:
        mode, model.training = model.training, False
        try:
            return forward(*args, **kwargs)
        finally:
            model.training = mode

    model.train().forward = evaluating
    for path in evaluated:
        model.get_submodule(path).training = False
