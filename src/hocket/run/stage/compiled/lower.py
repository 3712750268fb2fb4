"""Compiles a graph with Inductor.

Random operators are left to torch, one after the other: they draw what they draw in
eager mode. Each worker compiles in its own process: processes that compile for others
would stay, and hold memory, while the pipeline trains.

Weight gradients that are matrix products are accumulated in the product itself:

    dw = a @ b          makes a matrix as large as the weight; then total += dw reads
    total += dw         it again

    total += a @ b      one call of the library for products, which does the same

So these products take the parameter's `.grad`, and are no results of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, fx

from hocket.run.stage.compiled.graph.graphs import (
    inputs_of_graph,
    results_of_graph,
    value_of,
)
from hocket.run.stage.memory import memory_of
from hocket.run.stage.split.layers.accumulate import accumulate, has_hooks

# Takes a list and empties it, so that tensors without other users are freed on the way.
Lowered: TypeAlias = Callable[[list[Tensor]], Sequence[Any]]


def settings() -> AbstractContextManager[None]:
    """Set Inductor's options, for tracing too: they decide what is decomposed."""
    from torch._inductor import config

    patch: AbstractContextManager[None] = config.patch(
        fallback_random=True, compile_threads=1, reorder_for_peak_memory=False
    )
    return patch


def lowered(module: fx.GraphModule, mode: Any, *, is_backward: bool) -> Lowered:
    """Compile a graph of tensors without memory.

    Args:
        module: the graph, which returns a tuple.
        mode: the fake-tensor mode of its tensors' values.
        is_backward: whether it is a part of a backward.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    inputs = [value_of(node) for node in inputs_of_graph(module.graph)]
    results = results_of_graph(module.graph)
    # Results with other strides would not fit the graph that takes them.
    output = module.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    with V.set_fake_mode(mode), tracing(TracingContext(mode)), torch.no_grad():
        made: Lowered = compile_fx_inner(module, inputs, is_backward=is_backward)
    return made


_LIBRARY: Final = torch.library.Library("hocket", "DEF")
_LIBRARY.define(
    "add_product(Tensor(a!) total, Tensor a, Tensor b) -> ()",
    tags=(torch.Tag.flexible_layout,),
)


@torch.library.impl(_LIBRARY, "add_product", "CompositeExplicitAutograd")
def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    total.addmm_(a, b)


@dataclass(frozen=True, slots=True)
class Backward:
    """A compiled graph of gradients.

    Args:
        function: takes the graph's inputs, then the tensors that products are added to.
        added: the numbers of the tensors whose gradients it accumulates itself, in
            order.
        returned: the numbers of the tensors whose gradients it returns, in order.
        shared: the places, among the results, of weight gradients that are copied,
            since they share memory; see `shared_places`.
    """

    function: Lowered
    added: tuple[int, ...]
    returned: tuple[int, ...]
    shared: tuple[int, ...] = ()

    def run(self, given: list[Tensor], weights: Mapping[int, Tensor]) -> list[Tensor]:
        """Compute; weight gradients that are products are accumulated in `.grad`.

        Args:
            given: the graph's inputs; empty afterwards.
            weights: the parameters, by number.

        Returns:
            The gradients of `returned`, and the graph's other results.
        """
        totals = [_total(weights[i]) for i in self.added]
        given += totals
        results = list(self.function(given))
        given.clear()
        for place in self.shared:
            results[place] = results[place].clone()
        for i, total in zip(self.added, totals, strict=True):
            if weights[i].grad is not total:
                accumulate(weights[i], total)
        return results

    def shared_places(
        self,
        given: Iterable[Tensor],
        results: Sequence[Tensor],
        weights: Mapping[int, Tensor],
    ) -> tuple[int, ...]:
        """Return which weight gradients share memory with another tensor.

            x @ (a + b)   one tensor is the gradient of a and of b
            x + a         with one sample, that of a is the output's, as it was received

        A gradient is a parameter's own from then on, and added to. Where results lie is
        for Inductor to decide, but is the same in each run: so ask once.

        Args:
            given: a run's inputs.
            results: a run's results, all of them alive, and the inputs too.
            weights: the parameters, by number.
        """
        own = [place for place, i in enumerate(self.returned) if i in weights]
        others = [x for place, x in enumerate(results) if place not in own]
        taken = {memory_of(x) for x in (*given, *others)}
        found = []
        for place in own:
            memory = memory_of(results[place])
            if memory in taken:
                found.append(place)
            taken.add(memory)
        return tuple(found)


def _total(parameter: Tensor) -> Tensor:
    """Return what a product is added to: the parameter's gradient, or zeros."""
    so_far = parameter.grad
    if (
        so_far is not None
        and so_far.layout is torch.strided
        and so_far.dtype is parameter.dtype  # what the product is compiled for
        and so_far.stride() == parameter.stride()
        and not has_hooks(parameter)
    ):
        return so_far
    return torch.zeros_like(parameter, requires_grad=False)


def lowered_backward(
    module: fx.GraphModule, mode: Any, numbers: Sequence[int], likes: Mapping[int, Any]
) -> Backward:
    """Compile a graph of gradients.

    Args:
        module: the graph; its first results are gradients.
        mode: the fake-tensor mode of its tensors' values.
        numbers: the numbers of the tensors whose gradients these are.
        likes: the parameters among these tensors, without memory, by number.
    """
    graph = module.graph
    results = results_of_graph(graph)
    added = [
        i
        for i, number in enumerate(numbers)
        if number in likes and _is_product(results[i], results)
    ]
    last = inputs_of_graph(graph)[-1]
    for i in added:
        like = likes[numbers[i]]
        with graph.inserting_after(last):
            last = graph.placeholder(f"total_{i}")
        last.meta["val"] = like.detach()
        with graph.inserting_before(results[i]):
            graph.call_function(
                torch.ops.hocket.add_product.default, (last, *results[i].args)
            ).meta["val"] = None
    rest = tuple(node for i, node in enumerate(results) if i not in added)
    graph.output_node().args = (rest,)
    for i in added:
        graph.erase_node(results[i])
    module.recompile()
    return Backward(
        lowered(module, mode, is_backward=True),
        tuple(numbers[i] for i in added),
        tuple(number for i, number in enumerate(numbers) if i not in added),
    )


def _is_product(node: fx.Node, results: Sequence[fx.Node]) -> bool:
    """Return whether a node is a product that is one result and has no other user."""
    is_alone = len(node.users) == 1 and results.count(node) == 1
    return is_alone and node.target is torch.ops.aten.mm.default
