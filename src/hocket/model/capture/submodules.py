"""Captures a model as calls of its submodules, each run as it is.

For models whose code cannot be captured, because it depends on the data. The submodules
may do anything; the code between them may only pass tensors on:

    features = self.body(images)            body, head and loss are run as they are;
    outputs = self.head(features)           the code here is watched, and refused
    return self.loss(outputs, targets)      if it computes anything itself

A submodule that also only passes tensors on is opened in turn, so that the model can be
cut between its submodules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from torch import fx, nn
from torch.utils import _pytree as pytree

from hocket.errors import CaptureError
from hocket.model.capture.calls import ModuleCall, watch_calls
from hocket.model.capture.module_call import PLAIN, ModuleCalls
from hocket.model.capture.sequential import prefixes
from hocket.model.trace.example import Example
from hocket.model.trace.observe import preserve_state
from hocket.model.trace.per_sample import DATA, PerSample
from hocket.model.trace.sizes import BUT_ONE, OpenSizes
from hocket.model.trace.state import State
from hocket.model.trace.trace import CallSpan, Trace

_MOST_TRIED: Final = 32
_STRANGER: Final = (
    "a tensor that is none of its arguments, parameters and buffers, and that no "
    "submodule returned"
)


def closed_modules(calls: Sequence[ModuleCall], state: State) -> dict[str, str]:
    """Return the modules that are run as they are, and why each is not opened.

    Args:
        calls: the model's calls, in all modes.
        state: the model's state.
    """
    closed: dict[str, str] = {}
    own = {id(tensor) for tensor in state.tensors.values()}
    for root in calls:
        for call in root.all():
            why = _why_closed(call, root) or _foreign_value(call, own)
            if why:
                closed.setdefault(call.path, why)
    return closed


def check_open(closed: Mapping[str, str], names: Sequence[str]) -> None:
    """Refuse a model, or a submodule's name, that cannot be cut at.

    Raises:
        CaptureError: names what the code between the submodules computes.
    """
    if "" in closed:
        raise CaptureError(
            "the model cannot be cut between its submodules, either: in its forward, "
            f"{closed['']}. Put that into a submodule of its own"
        )
    for name in names:
        for path in prefixes(name)[:-1]:
            if path in closed:
                raise CaptureError(
                    f"the model cannot be cut before {name}, which is a part of "
                    f"{path}: {closed[path]}. Put that into a submodule of its own"
                )


def trace_submodules(
    call: ModuleCall, closed: Mapping[str, str], example: Example, state: State
) -> Trace:
    """List the calls of the submodules that are run as they are.

    Args:
        call: the call of the whole model.
        closed: the paths of the modules that are not opened.
        example: the example that it was called with.
        state: the model's state.
    """
    return _GraphBuilder(closed, example, state).trace(call)


def _why_closed(call: ModuleCall, root: ModuleCall) -> str:
    if call.work:
        return f"its own code computes {call.work}"
    hooks = (call.module._forward_hooks, call.module._forward_pre_hooks)
    if call is not root and any(hooks):
        return "it has hooks"
    return "" if call.inner else "it calls no submodules"


def _foreign_value(call: ModuleCall, state: set[int]) -> str:
    """Describe a value that a module passes on but neither got nor was returned."""
    known = state | _tensor_ids((call.args, dict(call.kwargs)))
    for inner in call.inner:
        if not _tensor_ids((inner.args, dict(inner.kwargs))) <= known:
            return f"it gives {inner.path} {_STRANGER}"
        known |= _tensor_ids(inner.out)
    return "" if _tensor_ids(call.out) <= known else f"it returns {_STRANGER}"


def _tensor_ids(structure: Any) -> set[int]:
    leaves = pytree.tree_leaves(structure)
    return {id(leaf) for leaf in leaves if isinstance(leaf, DATA)}


class _GraphBuilder:
    """Turns calls into a graph, by recognising objects that are passed on."""

    def __init__(
        self, closed: Mapping[str, str], example: Example, state: State
    ) -> None:
        self.closed = closed
        self.state = state
        self.graph = fx.Graph()
        self.num_samples = self.graph.placeholder("num_samples")
        self.objects: dict[str, Any] = {}
        self.modules: dict[fx.Node, tuple[str, ...]] = {}
        self.calls = ModuleCalls(self.graph, self.objects, self.modules)
        self.leaf_of: dict[fx.Node, int] = {}
        self.origin: dict[int, fx.Node] = {}
        self.names = {id(tensor): name for name, tensor in state.tensors.items()}
        for i, leaf in enumerate(example.leaves):
            if isinstance(leaf, DATA):
                node = self.graph.placeholder(f"leaf_{i}")
                self.leaf_of[node] = i
                self.origin[id(leaf)] = node

    def trace(self, root: ModuleCall) -> Trace:
        for call in self._whole(root):
            self._add(call)
        leaves, spec = pytree.tree_flatten(root.out)
        self.graph.output([self._leaf(leaf) for leaf in leaves])
        self.graph.eliminate_dead_code(lambda node: node.op != "call_function")
        return Trace(
            self.graph,
            self.state,
            self.objects,
            self.leaf_of,
            self.num_samples,
            self.modules,
            spec,
            spans={call.path: self._span(call) for call in _opened(root, self.closed)},
        )

    def _span(self, call: ModuleCall) -> CallSpan:
        leaves, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
        given = [x if isinstance(x, PLAIN) else self.origin.get(id(x)) for x in leaves]
        is_known = all(
            x is not None or leaf is None for x, leaf in zip(given, leaves, strict=True)
        )
        returned, out_spec = pytree.tree_flatten(call.out)
        found = ((i, self.origin.get(id(x))) for i, x in enumerate(returned))
        out = {i: x for i, x in found if x is not None}
        around = ("", *prefixes(call.path)[:-1]) if call.path else ()
        one = out_spec.is_leaf()
        return CallSpan(call.path, tuple(given), spec, out, one, is_known, around)

    def _whole(self, call: ModuleCall) -> Iterator[ModuleCall]:
        """Yield the calls of modules that are run as they are, in order."""
        for inner in call.inner:
            if inner.path in self.closed:
                yield inner
            else:
                yield from self._whole(inner)

    def _add(self, call: ModuleCall) -> None:
        path = call.path
        node = self.calls.add(path, call.module, call.args, call.kwargs, self._leaf)
        leaves, spec = pytree.tree_flatten(call.out)
        if spec.is_leaf():
            self.origin[id(call.out)] = node
            return
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, PLAIN):
                self.origin[id(leaf)] = self.calls.taken(path, node, i)

    def _leaf(self, leaf: Any) -> Any:
        """Return the node that made a leaf, or a constant."""
        if id(leaf) in self.origin and not isinstance(leaf, PLAIN):
            return self.origin[id(leaf)]
        if id(leaf) in self.names:
            return self.graph.create_node("get_attr", self.names[id(leaf)])
        assert not isinstance(leaf, DATA), "its module would be closed"
        return leaf if isinstance(leaf, PLAIN) else self.calls.object("constant", leaf)


def _opened(call: ModuleCall, closed: Mapping[str, str]) -> Iterator[ModuleCall]:
    """Yield the calls of modules that are opened, outermost first."""
    yield call
    for inner in call.inner:
        if inner.path not in closed:
            yield from _opened(inner, closed)


def tried(
    model: nn.Module,
    call: ModuleCall,
    trace: Trace,
    closed: Mapping[str, str],
    example: Example,
) -> tuple[Trace, str]:
    """Return a trace that knows for which numbers of samples it is right: some are run.

    Args:
        model: the model, in the trace's mode.
        call: its call with the example, which the trace is of.
        trace: what was recorded.
        closed: the paths of the modules that are not opened.
        example: the example.

    Returns:
        The trace; and why it is not right for one sample more than the example has.
    """
    own, state, asked = example.num_samples, trace.state, _asked(call, closed)
    faults: dict[int, str] = {own: ""}
    follows: dict[Any, str] = {}  # sizes that are others for other numbers

    def run(number: int) -> None:
        other = example.resized(number)
        try:
            with preserve_state(state):
                found = watch_calls(model, other)
                calls = trace_submodules(found, closed, other, state)
        except Exception as error:  # one sample may be refused
            faults[number] = f"{type(error).__name__}: {error}"
            return
        sizes = _asked(found, closed)
        follows.update((x, (asked | sizes)[x]) for x in asked.keys() ^ sizes.keys())
        computes = any(x.work for x in _opened(found, closed))
        is_known = _text(trace) == _text(calls) and not computes
        faults[number] = "" if is_known else "other numbers of samples have other calls"

    for number in (1, own + 1):
        run(number)
    # Of these it is not seen whether their lengths are asked for.
    is_hidden = any(isinstance(x, PerSample | np.ndarray) for x in example.leaves)
    if follows or faults[own + 1] or is_hidden:
        for number in range(2, min(own, _MOST_TRIED)):
            run(number)
    others = [fault for n, fault in faults.items() if fault and n > 1]
    if follows or others:  # a last batch may be of any number that was run
        known = {n for n, fault in faults.items() if not fault}
        why = [*(f"it asks for sizes {line}" for line in follows.values()), *others]
        trace = replace(trace, open=OpenSizes(known=known, asks=why[0]))
    elif faults[1]:
        trace = replace(trace, open=BUT_ONE)
    return trace, faults[own + 1]


def _asked(call: ModuleCall, closed: Mapping[str, str]) -> dict[Any, str]:
    """Return the sizes that opened modules asked for, each with the line of code."""
    return {k: x for own in _opened(call, closed) for k, x in own.asked.items()}


def _text(trace: Trace) -> list[str]:
    return [
        f"{node.name} {node.target} "
        f"{fx.node.map_arg((node.args, node.kwargs), lambda x: x.name)}"
        for node in trace.graph.nodes
    ]
