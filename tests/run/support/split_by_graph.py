"""Splits a backward in autograd's own graph: for any stage, and slowly.

Nodes from which a leaf can be reached are the trunk; what hangs on it leads to
parameters only. I runs the trunk, and records the gradients of the nodes which branches
leave from. W runs the branches of each of those:

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

from hocket.model.stages.splitter import SplitGradients, Starts
from hocket.model.stages.stage import StageModule
from hocket.run.stage.memory import memory_of, num_bytes_held
from hocket.run.stage.split.layers.accumulate import accumulate

Grads: TypeAlias = tuple[Tensor | None, ...]


class ByGraph:
    """Splits the backwards of one stage.

    Args:
        stage: the stage's module.
    """

    def __init__(self, stage: StageModule) -> None:
        self.module = stage

    def on(self) -> AbstractContextManager[object]:
        """See `Splitter.on`."""
        return nullcontext()

    def input_gradients(
        self, starts: Starts, grads: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> SplitGradients:
        """See `Splitter.input_gradients`."""
        tree = _Tree({get_gradient_edge(leaf).node for leaf in leaves})
        on_trunk: list[tuple[GradientEdge, Tensor]] = []
        off_trunk: list[tuple[GradientEdge, Tensor]] = []
        for edge, grad in zip(_edges(starts), grads, strict=True):
            place = on_trunk if tree.is_trunk(edge.node) else off_trunk
            place.append((edge, grad))
        left = GraphRemainder(tree, off_trunk)
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
    """The trunk and branches of autograd's graph.

    Args:
        leaves: the nodes where the trunk ends.
        trunk: for each node, whether it leads to one of the leaves.
        parameters: for each node off the trunk, the ends of its branch.
    """

    leaves: set[Node]
    trunk: dict[Node, bool] = field(default_factory=dict)
    parameters: dict[Node, frozenset[Node]] = field(default_factory=dict)

    def is_trunk(self, root: Node) -> bool:
        """Return whether a leaf can be reached from a node."""
        for node in _deepest_first(root, self.trunk):
            below = [self.trunk[child] for child in _children(node)]
            self.trunk[node] = node in self.leaves or any(below)
        return self.trunk[root]

    def ends(self, root: Node) -> frozenset[Node]:
        """Return the parameters' nodes that can be reached from a node."""
        for node in _deepest_first(root, self.parameters):
            below = [self.parameters[child] for child in _children(node)]
            own = [node] if hasattr(node, "variable") else []
            self.parameters[node] = frozenset(own).union(*below)
        return self.parameters[root]

    def with_branches(self, roots: Iterable[Node]) -> Iterator[Node]:
        """Return the nodes of the trunk that branches leave from."""
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
        """Return the edges from the trunk to parameters, with their numbers."""
        for i, (child, number) in enumerate(node.next_functions):
            if child is not None and not self.trunk[child] and self.ends(child):
                yield i, GradientEdge(child, number)


class GraphRemainder:
    """W: nodes, the gradients that they received, and their graph.

    Args:
        tree: the graph's trunk and branches.
        off_trunk: outputs that do not depend on a leaf, and their gradients.
    """

    def __init__(
        self, tree: _Tree, off_trunk: Sequence[tuple[GradientEdge, Tensor]]
    ) -> None:
        self._tree = tree
        self._off_trunk = list(off_trunk)
        self._recorded: list[tuple[Node, Grads]] = []
        self._sums: dict[Node, Tensor] = {}

    def record_grad(self, node: Node) -> Callable[[Grads], None]:
        """Return a pre-hook that records a node's gradients."""
        return lambda grads: self._recorded.append((node, grads))

    def finish(self) -> None:
        """See `Remainder.finish`."""
        for output, grad in self._off_trunk:
            self._run([output], [grad], self._tree.ends(output.node))
        uses = Counter(end for node, _ in self._recorded for end in self._ends_of(node))
        for node, grads in self._recorded:
            self._branch(node, grads, uses)
        self._add_up()
        self._sums.clear()
        self._off_trunk.clear()
        self._recorded.clear()

    def _add_up(self) -> None:
        """Accumulate the gradients; copy those that are not this object's alone."""
        given = [*self._grads(), *(grad for _, grad in self._off_trunk)]
        taken = set(map(memory_of, given))
        for node, total in self._sums.items():
            own = total.clone() if memory_of(total) in taken else total
            taken.add(memory_of(own))
            accumulate(_parameter(node), own)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return True: what the graph holds is unknown."""
        return True

    @property
    def num_bytes(self) -> int:
        """The bytes of the trunk's gradients; the graph's own are unknown."""
        return num_bytes_held(self._grads())

    def _grads(self) -> list[Tensor]:
        """Return the gradients of the trunk's nodes."""
        return [x for _, grads in self._recorded for x in grads if x is not None]

    def _ends_of(self, node: Node) -> frozenset[Node]:
        ends = [self._tree.ends(edge.node) for _, edge in self._tree.branches(node)]
        return frozenset[Node]().union(*ends)

    def _branch(self, node: Node, grads: Grads, uses: Counter[Node]) -> None:
        """Run one node of the trunk for its branches."""
        ends = self._ends_of(node)
        if all(uses[end] == 1 for end in ends):
            given = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
            edges = [GradientEdge(node, i) for i, _ in given]
            self._run(edges, [grad for _, grad in given], ends)
            return
        # The trunk leads to other uses of the same parameter. Autograd would follow it.
        function: Any = node
        computed = function(*grads)
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
        """Run the branches on to the parameters."""
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
    """Reduce and cast a gradient to its node's shape and type, as autograd does."""
    expected = edge.node._input_metadata[edge.output_nr]
    return grad.sum_to_size(expected.shape).to(expected.dtype)


def _parameter(end: Any) -> Tensor:
    """Return the parameter at the end of a branch."""
    parameter: Tensor = end.variable
    return parameter


@contextmanager
def _without_hooks(ends: Sequence[Node]) -> Iterator[None]:
    """Suspend hooks on parts of a gradient; they run on the sum."""
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
    """Return all unknown nodes below a root, each after all that it leads to."""
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
