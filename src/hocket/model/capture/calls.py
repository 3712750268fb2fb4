"""Records a model's run: which module calls which, and what each computes itself.

Detector                        works: no       only passes on what modules return
├── body                        works: no
│   ├── body.conv1
│   └── body.layer1
├── pyramid                     works: torch.add, at models.py:31
└── loss                        works: torch.Tensor.item, at models.py:57
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from hocket.model.capture.attribute_writes import preserve_attributes
from hocket.model.capture.source_line import source_line_of
from hocket.model.trace.example import Example

# Reading these is not computing: what follows from them is the same for every
# microbatch of one size, and whether other sizes lead to the same calls is checked.
_QUESTIONS: Final = frozenset(
    {
        "__len__",
        "device",
        "dim",
        "dtype",
        "is_cuda",
        "is_floating_point",
        "layout",
        "ndim",
        "numel",
        "requires_grad",
        "shape",
        "size",
    }
)
_OF_SIZES: Final = frozenset({"__len__", "numel", "shape", "size"})


@dataclass(slots=True)
class ModuleCall:
    """One call of a module, with the objects that it took and returned.

    Args:
        path: the module's path in the model.
        module: the module.
        args: positional arguments.
        kwargs: keyword arguments.
        out: what it returned.
        inner: the calls that it made itself, in order.
        work: the first thing that its own code computed, and where; empty if it
            computes nothing.
        asked: the sizes that its own code asked for until then, each with the line.
    """

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any = None
    inner: list[ModuleCall] = field(default_factory=list)
    work: str = ""
    asked: dict[Any, str] = field(default_factory=dict)

    def all(self) -> Iterator[ModuleCall]:
        """Yield this call and those inside it."""
        yield self
        for call in self.inner:
            yield from call.all()


def watch_calls(model: nn.Module, example: Example) -> ModuleCall:
    """Run a model once, on the data, and record its calls.

    Plain attributes of its modules are restored; the caller restores buffers and random
    state.
    """
    args, kwargs = example.call()
    watch = _CallRecorder()
    with preserve_attributes(model):
        for path, module in model.named_modules():
            watch.follow(path, module)
        with torch.enable_grad(), watch:
            model(*args, **kwargs)
    (call,) = watch.found
    return call


class _CallRecorder(TorchFunctionMode):
    """Records calls of modules, and of torch's functions in between."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[ModuleCall] = []
        self.stack: list[ModuleCall] = []

    def follow(self, path: str, module: nn.Module) -> None:
        """Record a module's calls, until its attributes are restored."""

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.stack.append(ModuleCall(path, module, args, kwargs))

        def after(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            call = self.stack.pop()
            call.out = out
            (self.stack[-1].inner if self.stack else self.found).append(call)

        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        call, name = self.stack[-1] if self.stack else None, _name_of_function(func)
        if call is None or call.work or name in _QUESTIONS - _OF_SIZES:
            return answer
        source_line = source_line_of(traceback.extract_stack()).strip()
        if name in _OF_SIZES:
            call.asked.setdefault((call.path, name, answer), source_line)
        else:
            call.work = f"{resolve_name(func) or func}, {source_line}"
        return answer


def _name_of_function(function: Any) -> str:
    """Return the name of a function, method or property."""
    name: str = getattr(function, "__name__", "")
    owner = getattr(function, "__self__", None)
    return getattr(owner, "__name__", name) if name == "__get__" else name
