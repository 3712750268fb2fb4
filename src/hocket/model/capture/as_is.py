"""Runs modules that cannot be captured as they are, inside a captured graph.

    captured calls ─▶ one call of the module ─▶ captured calls

torch.export sees one operator in place of the module. It has to know the shapes that
the module returns for any number of samples, and nothing of what the module does. Runs
on the data show them: with the example's samples, with one more, and with equal ones,
since a shape may depend on the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

from hocket.errors import CaptureError
from hocket.model.capture.attribute_writes import preserve_attributes
from hocket.model.capture.lost_in_graph import numbers_state
from hocket.model.capture.sequential import hooks_of
from hocket.model.trace.example import Example
from hocket.model.trace.observe import preserve_state
from hocket.model.trace.state import State

# Of a node: the calls of modules that have its value as an argument or a result.
PLACES: Final = "hocket_places_in_calls"
_SCHEMA: Final = (
    "(str call, Tensor[] tensors, SymInt[] sizes, SymInt[] shapes, int[] ranks, "
    "ScalarType[] dtypes, Device device) -> Tensor[]"
)


@torch.library.custom_op("hocket::module_as_is", mutates_args=(), schema=_SCHEMA)
def module_as_is(*_: Any) -> list[Tensor]:
    """Stand for a module in the graph of torch.export."""
    raise AssertionError("replaced by a call of the module before the graph is run")


@module_as_is.register_fake
def _fake(
    call: str,
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    shapes: Sequence[int],
    ranks: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> list[Tensor]:
    lengths = iter(shapes)
    made = zip(ranks, dtypes, strict=True)
    return [
        torch.empty([next(lengths) for _ in range(rank)], dtype=dtype, device=device)
        for rank, dtype in made
    ]


@dataclass(frozen=True, slots=True)
class ShownTensor:
    """The shape and type of a tensor that a module returned."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class SeenCall:
    """A call of a module on the data.

    Args:
        given: the leaves of `(args, kwargs)`, with None in place of tensors.
        out: the leaves of what it returned, with `ShownTensor` in place of tensors.
        spec: the structure of what it returned.
    """

    given: tuple[Any, ...]
    out: tuple[Any, ...]
    spec: pytree.TreeSpec


# The calls of each module in one run, by its path.
SeenCalls: TypeAlias = Mapping[str, Sequence[SeenCall]]


@dataclass(frozen=True, slots=True)
class OpaqueCall:
    """A call in an exported graph.

    Args:
        path: the module's path in the model.
        module: the module.
        given: the leaves of `(args, kwargs)`, with None where tensors or numbers of
            the graph go.
        is_tensor: for each leaf, whether a tensor goes there.
        is_size: for each leaf, whether a number of the graph goes there.
        spec: the structure of `(args, kwargs)`.
        out: the leaf that each tensor has among all that is returned; empty if the
            module returns one tensor.
    """

    path: str
    module: nn.Module
    given: tuple[Any, ...]
    is_tensor: tuple[bool, ...]
    is_size: tuple[bool, ...]
    spec: pytree.TreeSpec
    out: tuple[int, ...]

    def arguments(
        self, tensors: Sequence[Any], sizes: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `(args, kwargs)` with these in place of tensors and numbers."""
        next_tensor, next_size = iter(tensors), iter(sizes)
        leaves = [
            next(next_tensor) if tensor else next(next_size) if size else leaf
            for leaf, tensor, size in zip(
                self.given, self.is_tensor, self.is_size, strict=True
            )
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


@dataclass(slots=True)
class WatchedCall:
    """The call of a module that is captured.

    Args:
        given: the leaves of `(args, kwargs)`.
        spec: the structure of `(args, kwargs)`.
        around: the keys of the calls that it is inside of, outermost first.
        out_spec: the structure of what it returned; None if it did not return.
        is_known: whether all tensors among them are known to the graph.
    """

    given: tuple[Any, ...]
    spec: pytree.TreeSpec
    around: tuple[str, ...]
    out_spec: pytree.TreeSpec | None = None
    is_known: bool = True


class ModulesAsIs:
    """Puts the operator in place of modules while a model is exported once.

    Args:
        closed: the paths of the modules that are run as they are; of the model itself,
            the hooks alone are left out.
        runs: what the modules did with the example's samples, with equal ones, and
            with one more.
        example: what the runs are with, and the form of what it is exported with.

    Attributes:
        calls: the calls in the graph, by the operator's first argument.
        running: the keys of the calls that are running, outermost first.
        watched: all calls of modules, by key.
        special: what the own code of some calls does that calls in a graph do not.
        drawing: the calls that draw random numbers of Python or NumPy.
    """

    def __init__(
        self, closed: frozenset[str], runs: Sequence[SeenCalls], example: Example
    ) -> None:
        self.closed = closed
        self.calls: dict[str, OpaqueCall] = {}
        self.running: list[str] = []
        self.watched: dict[str, WatchedCall] = {}
        self.special: dict[str, str] = {}
        self.drawing: set[str] = set()
        self._numbers = numbers_state()
        self._runs = runs
        self._first_leaf = example.batched.index(True)
        self._seen_samples = example.num_samples
        self._num_samples: Any = 0
        self._count: Counter[str] = Counter()
        self._num_begun: Counter[str] = Counter()

    def put_in(self, model: nn.Module) -> None:
        """Change the model's modules, until their attributes are restored."""
        for path, module in model.named_modules():
            # A call of the module calls its hooks; those of backwards do nothing here.
            for hooks in hooks_of(module, forward=path in self.closed):
                hooks.clear()
            module.register_forward_pre_hook(
                self._beginning(path), prepend=True, with_kwargs=True
            )
            module.register_forward_hook(self._ended)
            if path and path in self.closed:
                module.forward = self._opaque(path, module)
        model.register_forward_pre_hook(self._note_samples, with_kwargs=True)

    def _note_samples(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._num_samples = pytree.tree_leaves((args, kwargs))[self._first_leaf].shape[
            0
        ]

    def _beginning(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
            number = self._num_begun[path]
            self._num_begun[path] += 1
            key = f"{path}@{number}" if number else path
            self._note_drawing()
            given, spec = pytree.tree_flatten((args, kwargs))
            self.watched[key] = WatchedCall(tuple(given), spec, tuple(self.running))
            self.running.append(key)
            self._note(key, "given", given)

        return begin

    def note_special(self, what: str) -> None:
        """Note what the code of the innermost module does that a graph loses."""
        self.special |= dict.fromkeys(self.running[-1:], what)

    def _note_drawing(self) -> None:
        """Note whether the code that has run since a module began or ended drew."""
        numbers = numbers_state()
        if numbers != self._numbers:
            self.drawing.update(self.running[-1:])
            self.note_special("it draws random numbers of Python or NumPy")
            self._numbers = numbers

    def _ended(self, _: nn.Module, __: Any, out: Any) -> None:
        self._note_drawing()
        key = self.running.pop()
        leaves, self.watched[key].out_spec = pytree.tree_flatten(out)
        self._note(key, "out", leaves)

    def _note(self, key: str, side: str, leaves: Sequence[Any]) -> None:
        """Note in the graph which leaves of a call its tensors are."""
        mode = proxy_tensor.get_proxy_mode()
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            slot = None
            if mode is not None:
                slot = proxy_tensor.get_proxy_slot(leaf, mode.tracer, None)
            if slot is None:
                self.watched[key].is_known = False
            else:
                slot.proxy.node.meta.setdefault(PLACES, []).append((key, side, i))

    def _opaque(self, path: str, module: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            number = self._count[path]
            self._count[path] += 1
            leaves, spec = pytree.tree_flatten((args, kwargs))
            seen = self._seen(path, number)
            _check_given(path, leaves, seen)
            name = f"{path}@{number}"
            self.calls[name] = _opaque_call(path, module, leaves, spec, seen[0])
            return self._call(name, leaves, seen)

        return forward

    def _seen(self, path: str, number: int) -> list[SeenCall]:
        calls = [run.get(path, ()) for run in self._runs]
        if any(len(found) <= number for found in calls):
            raise _unknown(path, "it is not called in every run on the data")
        return [found[number] for found in calls]

    def _call(self, name: str, leaves: Sequence[Any], seen: Sequence[SeenCall]) -> Any:
        path = name.rpartition("@")[0]
        growths = _growths(path, seen)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        made = [x for x in seen[0].out if isinstance(x, ShownTensor)]
        shapes = [
            self._length(length, more)
            for tensor, growth in zip(made, growths, strict=True)
            for length, more in zip(tensor.shape, growth, strict=True)
        ]
        if not tensors:
            raise _unknown(path, "it takes no tensor")
        outputs = iter(
            torch.ops.hocket.module_as_is(
                name,
                tensors,
                [x for x in leaves if isinstance(x, torch.SymInt)],
                shapes,
                [len(x.shape) for x in made],
                [x.dtype for x in made],
                tensors[0].device,
            )
        )
        out = [next(outputs) if isinstance(x, ShownTensor) else x for x in seen[0].out]
        return pytree.tree_unflatten(out, seen[0].spec)

    def _length(self, length: int, growth: int) -> Any:
        fixed = length - growth * self._seen_samples
        return growth * self._num_samples + fixed if growth else length


def seen_calls(
    model: nn.Module, example: Example, state: State
) -> tuple[SeenCalls, SeenCalls, SeenCalls]:
    """Run the model on the data and return what its modules did.

    Args:
        model: the module, in training or evaluation mode; it is not changed.
        example: what it is called with.
        state: its parameters and buffers.

    Returns:
        What they did with the example, with the same number of equal samples, and with
        one sample more (with the example, if the model does not run with more).
    """
    equal = example.resized(1).resized(example.num_samples)
    first, second = (_run(model, x, state) for x in (example, equal))
    with suppress(Exception):
        more = example.resized(example.num_samples + 1)
        return first, second, _run(model, more, state)
    return first, second, first


def _run(model: nn.Module, example: Example, state: State) -> SeenCalls:
    """Run the model; with a graph, if a forward runs a backward of its own on it."""
    try:
        return _run_once(model, example, state, records=False)
    except RuntimeError:
        return _run_once(model, example, state, records=True)


def _run_once(
    model: nn.Module, example: Example, state: State, *, records: bool
) -> SeenCalls:
    found: dict[str, list[SeenCall]] = {}

    def note(path: str) -> Callable[..., None]:
        def after(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            leaves, spec = pytree.tree_flatten(out)
            given = pytree.tree_leaves((args, kwargs))
            constants = (None if isinstance(x, Tensor) else x for x in given)
            call = SeenCall(tuple(constants), tuple(map(_shown, leaves)), spec)
            found.setdefault(path, []).append(call)

        return after

    args, kwargs = example.call()
    recording = torch.set_grad_enabled(records)
    with preserve_attributes(model), preserve_state(state), recording:
        for path, module in model.named_modules():
            module.register_forward_hook(note(path), with_kwargs=True)
        model(*args, **kwargs)
    return found


def _shown(leaf: Any) -> Any:
    is_tensor = isinstance(leaf, Tensor)
    return ShownTensor(tuple(leaf.shape), leaf.dtype) if is_tensor else leaf


def _unknown(path: str, why: str) -> CaptureError:
    return CaptureError(f"{path} cannot be run as it is: {why}")


def _check_given(path: str, leaves: Sequence[Any], seen: Sequence[SeenCall]) -> None:
    """Refuse arguments that are no tensors, and others in each run."""
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor | torch.SymInt):
            continue
        if any(len(call.given) <= i or call.given[i] != leaf for call in seen):
            kind = type(leaf).__name__
            raise _unknown(path, f"an argument, a {kind}, is another in each run")


def _growths(path: str, seen: Sequence[SeenCall]) -> Iterator[tuple[int, ...]]:
    """Yield how much each dimension of each tensor grows with one more sample."""
    first, equal, more = seen
    if not first.spec == equal.spec == more.spec:
        raise _unknown(path, "the structure of what it returns depends on the data")
    for a, b, c in zip(first.out, equal.out, more.out, strict=True):
        if a != b:
            raise _unknown(path, f"what it returns depends on the data: {a} and {b}")
        if isinstance(a, ShownTensor):
            if not isinstance(c, ShownTensor) or len(a.shape) != len(c.shape):
                raise _unknown(path, f"it returns {a}, and {c} with one sample more")
            yield tuple(y - x for x, y in zip(a.shape, c.shape, strict=True))


def _opaque_call(
    path: str,
    module: nn.Module,
    leaves: Sequence[Any],
    spec: pytree.TreeSpec,
    seen: SeenCall,
) -> OpaqueCall:
    is_tensor = tuple(isinstance(x, Tensor) for x in leaves)
    is_size = tuple(isinstance(x, torch.SymInt) for x in leaves)
    given = tuple(None if isinstance(x, Tensor | torch.SymInt) else x for x in leaves)
    places = (i for i, x in enumerate(seen.out) if isinstance(x, ShownTensor))
    out = () if seen.spec.is_leaf() else tuple(places)
    return OpaqueCall(path, module, given, is_tensor, is_size, spec, out)
