"""Take a backward apart in autograd's own graph: for anything, and slowly.

Nodes from which a leaf can be reached are the trunk; what hangs on it leads to
parameters only. I runs the trunk, and notes the gradients that come to the nodes which
branches leave from. W lets each of those compute its branches:

    dy ──▶ AddmmBackward ──▶ GeluBackward ──▶ AddmmBackward ──▶ leaf       trunk
                │                                  │
                └▶ TBackward ▶ w2                  └▶ TBackward ▶ w1       branches

It holds all that the forward kept until W has ended. torch.distributed.pipelining does
the same (its `_backward.py`), with parameters in groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from hocket.model.stages.stage import StageModule
from hocket.run.stage.split.layers.accumulate import accumulate
from hocket.run.stage.split.splitter import Halves, Starts

Grads: TypeAlias = tuple[Tensor | None, ...]


class ByGraph:
    """The backwards of one stage.

    Args:
        stage: what it computes.
    """

    def __init__(self, stage: StageModule) -> None:
        self.module = stage

    def on(self) -> AbstractContextManager[object]:
        """See `Splitter.on`."""
        return nullcontext()

    def input_gradients(
        self,
        starts: Starts,
        grads: Sequence[Tensor],
        leaves: Sequence[Tensor],
    ) -> Halves:
        """See `Splitter.input_gradients`."""
        tree = _Tree({get_gradient_edge(leaf).node for leaf in leaves})
        on_trunk: list[tuple[GradientEdge, Tensor]] = []
        apart: list[tuple[GradientEdge, Tensor]] = []
        for edge, grad in zip(_edges(starts), grads, strict=True):
            place = on_trunk if tree.is_trunk(edge.node) else apart
            place.append((edge, grad))
        left = GraphRemainder(tree, apart)
        if not on_trunk:
            return [None for _ in leaves], left
        nodes = list(tree.with_branches(output.node for output, _ in on_trunk))
        handles = [node.register_prehook(left.record_grad(node)) for node in nodes]
        try:
            found = torch.autograd.grad(
                [output for output, _ in on_trunk],
                leaves,
                [grad for _, grad in on_trunk],
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()
        return found, left


@dataclass(slots=True)
class _Tree:
    """What is known of a graph's nodes.

    Args:
        leaves: where the trunk ends.
        trunk: whether a node leads to one of them.
        parameters: of each node off the trunk, where its branch ends.
    """

    leaves: set[Node]
    trunk: dict[Node, bool] = field(default_factory=dict)
    parameters: dict[Node, frozenset[Node]] = field(default_factory=dict)

    def is_trunk(self, root: Node) -> bool:
        """Whether a leaf can be reached from a node."""
        for node in _deepest_first(root, self.trunk):
            below = [self.trunk[child] for child in _children(node)]
            self.trunk[node] = node in self.leaves or any(below)
        return self.trunk[root]

    def ends(self, root: Node) -> frozenset[Node]:
        """The parameters' nodes that can be reached from a node."""
        for node in _deepest_first(root, self.parameters):
            below = [self.parameters[child] for child in _children(node)]
            own = [node] if hasattr(node, "variable") else []
            self.parameters[node] = frozenset(own).union(*below)
        return self.parameters[root]

    def with_branches(self, roots: Iterable[Node]) -> Iterator[Node]:
        """The nodes of the trunk that branches leave from."""
        seen: set[Node] = set()
        waiting = list(roots)
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            waiting += [child for child in _children(node) if self.trunk[child]]
            if any(self.branches(node)):
                yield node

    def branches(self, node: Node) -> Iterator[tuple[int, GradientEdge]]:
        """The edges that lead from the trunk to parameters, with their numbers."""
        for i, (child, number) in enumerate(node.next_functions):
            if child is not None and not self.trunk[child] and self.ends(child):
                yield i, GradientEdge(child, number)


class GraphRemainder:
    """What I leaves for W: nodes, the gradients that came to them, and their graph.

    Args:
        tree: of the graph.
        apart: outputs that no leaf has a part in, and their gradients.
    """

    def __init__(
        self, tree: _Tree, apart: Sequence[tuple[GradientEdge, Tensor]]
    ) -> None:
        self._tree = tree
        self._apart = list(apart)
        self._heard: list[tuple[Node, Grads]] = []
        self._sums: dict[Node, Tensor] = {}

    def record_grad(self, node: Node) -> Callable[[Grads], None]:
        """A hook in front of a node."""
        return lambda grads: self._heard.append((node, grads))

    def finish(self) -> None:
        """See `Remainder.finish`."""
        for output, grad in self._apart:
            self._run([output], [grad], self._tree.ends(output.node))
        uses = Counter(end for node, _ in self._heard for end in self._ends_of(node))
        for node, grads in self._heard:
            self._branch(node, grads, uses)
        self._add_up()
        self._sums.clear()
        self._apart.clear()
        self._heard.clear()

    def _add_up(self) -> None:
        """One tensor may be the gradient of several, or one that I was given."""
        given = [x for _, grads in self._heard for x in grads if x is not None]
        taken = {_memory(x) for x in (*given, *(grad for _, grad in self._apart))}
        for node, total in self._sums.items():
            own = total.clone() if _memory(total) in taken else total
            taken.add(_memory(own))
            accumulate(_parameter(node), own)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """It cannot tell what the graph holds."""
        return True

    @property
    def num_bytes(self) -> int:
        """Only the gradients on the trunk; the graph does not tell what it holds."""
        heard = [x for _, grads in self._heard for x in grads if x is not None]
        storages = [x.untyped_storage() for x in heard]
        return sum({x.data_ptr(): x.nbytes() for x in storages}.values())

    def _ends_of(self, node: Node) -> frozenset[Node]:
        ends = [self._tree.ends(edge.node) for _, edge in self._tree.branches(node)]
        return frozenset[Node]().union(*ends)

    def _branch(self, node: Node, grads: Grads, uses: Counter[Node]) -> None:
        """Let one node of the trunk compute what its branches need."""
        ends = self._ends_of(node)
        if all(uses[end] == 1 for end in ends):
            given = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
            edges = [GradientEdge(node, i) for i, _ in given]
            self._run(edges, [grad for _, grad in given], ends)
            return
        # The trunk leads to other uses of the same parameter. Autograd would follow it.
        computed: Any = node(*grads)  # type: ignore[operator]
        for i, edge in self._tree.branches(node):
            if computed[i] is not None:
                grad = _as_expected(computed[i], edge)
                self._run([edge], [grad], self._tree.ends(edge.node))

    def _run(
        self,
        edges: Sequence[GradientEdge],
        grads: Sequence[Tensor],
        ends: frozenset[Node],
    ) -> None:
        """Go on along the branches to the parameters."""
        order = list(ends)
        if len(edges) == 1 and order == [edges[0].node]:
            self._add(order[0], grads[0])
            return
        with _without_hooks(order):
            found = torch.autograd.grad(
                edges,
                [GradientEdge(end, 0) for end in order],
                grads,
                retain_graph=True,
                allow_unused=True,
            )
        for end, grad in zip(order, found, strict=True):
            if grad is not None:
                self._add(end, grad)

    def _add(self, end: Node, grad: Tensor) -> None:
        self._sums[end] = self._sums[end] + grad if end in self._sums else grad


def _edges(starts: Starts) -> list[GradientEdge]:
    return [get_gradient_edge(x) if isinstance(x, Tensor) else x for x in starts]


def _as_expected(grad: Tensor, edge: GradientEdge) -> Tensor:
    """What was broadcast is added up, what was cast is cast back, as autograd does."""
    expected = edge.node._input_metadata[edge.output_nr]
    return grad.sum_to_size(expected.shape).to(expected.dtype)


def _memory(tensor: Tensor) -> int:
    return id(tensor) if tensor.is_sparse else tensor.untyped_storage().data_ptr()


def _parameter(end: Node) -> Tensor:
    parameter: Tensor = end.variable  # type: ignore[attr-defined]
    return parameter


@contextmanager
def _without_hooks(ends: Sequence[Node]) -> Iterator[None]:
    """Autograd calls hooks on each part of a gradient; they are due on its sum."""
    hooks = [_parameter(end)._backward_hooks or {} for end in ends]
    kept = [dict(some) for some in hooks]
    for some in hooks:
        some.clear()
    try:
        yield
    finally:
        for some, mine in zip(hooks, kept, strict=True):
            some.update(mine)


def _children(node: Node) -> Iterator[Node]:
    return (child for child, _ in node.next_functions if child is not None)


def _deepest_first(root: Node, known: dict[Node, Any]) -> Iterator[Node]:
    """All nodes below one that are not known yet, each behind all that it leads to."""
    waiting = [(root, False)]
    while waiting:
        node, is_left = waiting.pop()
        if node in known:
            continue
        if is_left:
            yield node
        else:
            waiting.append((node, True))
            waiting += [(child, False) for child in _children(node)]
