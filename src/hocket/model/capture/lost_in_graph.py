"""Finds what modules do that calls in a graph do not.

    if random.random() < self.rate:               drawn once for ever, in a graph
        y.register_hook(self.log)                 never called

The innermost module that was running does it, so it has to run as it is.

torch.export writes down one forward, with every plain attribute as it was before. What
a forward leaves in an attribute for the next one would be lost without a word:

    self.last = y.detach()                        read by others only: nothing lost
    self.ramp = self.ramp or torch.arange(n)      the same in each forward: nothing lost
    self.hidden = f(x, self.hidden)               state: the graph would have none

Only a model whose forward changes its attributes is looked at, by two forwards.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from hocket.errors import CaptureError
from hocket.model.capture.attribute_writes import AttributeSnapshot, preserve_attributes
from hocket.model.capture.source_line import source_line_of
from hocket.model.trace.are_close import are_close
from hocket.model.trace.example import Example
from hocket.model.trace.observe import preserve_state
from hocket.model.trace.per_sample import tensors_in
from hocket.model.trace.replaced import replaced
from hocket.model.trace.state import State

_HOOKS: Final = ("register_hook", "retain_grad", "register_post_accumulate_grad_hook")


def numbers_state() -> tuple[Any, ...]:
    """Return the state of the generators of Python and NumPy, that can be compared."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (name, np.asarray(keys).tobytes(), *rest)


def restore_numbers(state: tuple[Any, ...]) -> None:
    """Restore the state of the generators of Python and NumPy."""
    random.setstate(state[0])
    name, keys, *rest = state[1]
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))


@contextmanager
def preserve_numbers() -> Iterator[None]:
    """Restore the generators of Python and NumPy when the block ends."""
    state = numbers_state()
    try:
        yield
    finally:
        restore_numbers(state)


def hooks_noted(note: Callable[[str], None]) -> AbstractContextManager[None]:
    """Call a function whenever a hook is put on a tensor; it gets the user's line."""

    def noting(hook: Callable[..., Any]) -> Callable[..., Any]:
        def noted(tensor: Tensor, *args: Any) -> Any:
            line = source_line_of(traceback.extract_stack()).strip()
            note(f"its forward calls {hook.__name__} {line}")
            return hook(tensor, *args)

        return noted

    return replaced(Tensor, *_HOOKS, by=noting)


class LostInGraphError(CaptureError):
    """A graph would silently lose what modules do, so they have to run as they are.

    Args:
        message: what is lost.
        names: the attributes that are; none if the innermost running module does it.
    """

    def __init__(self, message: str, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = names


def check_keeps_no_state(
    model: nn.Module, example: Example, changed: Sequence[str]
) -> Sequence[str]:
    """Run it twice on the data, and see that the second time is as the first.

    Args:
        model: the module, in the mode that it is captured in; it is not changed.
        example: what it is called with.
        changed: the attributes that a forward changes, for the error.

    Returns:
        The attributes that each forward changes again.

    Raises:
        CaptureError: it is not.
    """
    state = State.of(model)
    example = example.resized(example.num_samples)  # a copy, for it may be changed
    if any(x.is_meta for x in (*state.tensors.values(), *tensors_in(example.leaves))):
        return changed  # without data, as in plans for other machines
    with preserve_attributes(model):
        first = _outputs(model, example, state)
        notes = AttributeSnapshot(model)
        second = _outputs(model, example, state)
        changed_again = notes.changed()
    if not are_close(first, second):
        raise LostInGraphError(
            "the model cannot be captured: it keeps state in "
            f"{', '.join(changed)} from one forward to the next, which a captured "
            "graph would not have. Let forward take it as an argument and return it, "
            "or start over each time; statistics that no gradient flows through belong "
            "in a buffer, changed in place",
            changed,
        )
    return changed_again


def _outputs(model: nn.Module, example: Example, state: State) -> list[Tensor]:
    """Return a forward's outputs, restoring buffers and random state."""
    args, kwargs = example.call()
    homes = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    with preserve_state(state), torch.no_grad():
        torch.manual_seed(0)
        outputs = tensors_in(model(*args, **kwargs))
    for home, buffers in homes:
        home.update(buffers)
    return [x.clone() for x in outputs]
