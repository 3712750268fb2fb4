"""Compiles a graph with Inductor.

Random operators are left to torch, one after the other: they draw what they draw in
eager mode. Each worker compiles in its own process: processes that compile for others
would stay, and hold memory, while the pipeline trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from hocket.run.stage.compiled.graph.graphs import (
    inputs_of_graph,
    results_of_graph,
    value_of,
)

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
