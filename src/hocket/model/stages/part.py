"""Selects the calls that a stage runs in one mode, and their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, fx

from hocket.model.trace.flow import TraceFlow

_ATTENTION: Final = torch.ops.aten.scaled_dot_product_attention.default
_MASK: Final = 3  # the place of `attn_mask` among its arguments
_IS_CAUSAL: Final = 5


@dataclass(frozen=True, slots=True)
class Part:
    """The calls of one stage in one mode.

    Args:
        flow: the whole model's dependencies in this mode.
        is_last: whether the model's output is made here.
        body: the calls that run for each microbatch, in order: the stage's own, and
            those on the batch alone that it repeats for itself.
        kept: the calls that run once per number of samples, in order.
        reads: the body's inputs that it does not make.
        masks: the calls of `kept` that only make the mask of attention.
    """

    flow: TraceFlow
    is_last: bool
    body: tuple[fx.Node, ...]
    kept: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    masks: tuple[fx.Node, ...]

    @property
    def leaves(self) -> frozenset[int]:
        """The positions in the batch of the tensors that the stage reads itself."""
        leaf_of = self.flow.trace.leaf_of
        return frozenset(leaf_of[node] for node in self.reads if node in leaf_of)

    @property
    def state(self) -> tuple[fx.Node, ...]:
        """The parameters and buffers that the body reads."""
        return tuple(node for node in self.reads if self.flow.trace.is_state(node))

    @property
    def constants(self) -> tuple[fx.Node, ...]:
        """The body's inputs that `kept` makes, besides masks."""
        return tuple(node for node in self.reads if self._is_constant(node))

    @property
    def uses_num_samples(self) -> bool:
        """Whether anything in it depends on the number of samples."""
        size = self.flow.trace.num_samples
        return size in self.reads or any(size in x.all_input_nodes for x in self.kept)

    def _is_constant(self, node: fx.Node) -> bool:
        trace = self.flow.trace
        is_made = node in self.flow.shape_only or node is trace.num_samples
        return is_made or isinstance(trace.objects.get(str(node.target)), Tensor)


def part_of(flow: TraceFlow, start: int, end: int) -> Part:
    """Return the part between two positions.

    Args:
        flow: the whole model's dependencies in one mode.
        start: the position at which the stage begins.
        end: the position at which the next one begins.
    """
    calls = flow.trace.calls
    is_last = end == len(flow.compute)
    own = frozenset(flow.compute[start:end])
    ends = (flow.trace.output,) if is_last else ()
    repeatable = frozenset(calls).difference(flow.compute, flow.shape_only)
    repeated = _needed(flow.needs, (*own, *ends), repeatable.__contains__)
    body = tuple(node for node in calls if node in own or node in repeated)
    kept = _needed(flow.needs, (*body, *ends), flow.shape_only.__contains__)
    made = frozenset(body)
    reads = dict.fromkeys(
        x for node in (*body, *ends) for x in inputs_of(flow, node) if x not in made
    )
    masks = dict.fromkeys(mask for x in body if (mask := simple_mask(flow, x)))
    return Part(
        flow,
        is_last,
        body,
        tuple(node for node in calls if node in kept),
        tuple(reads),
        tuple(masks),
    )


def simple_mask(flow: TraceFlow, node: fx.Node) -> fx.Node | None:
    """Return the mask of an attention call, if it depends on the shape alone."""
    if node.target is not _ATTENTION or not _MASK < len(node.args) <= _IS_CAUSAL:
        return None
    mask = node.args[_MASK]
    is_kept = isinstance(mask, fx.Node) and mask in flow.shape_only
    return mask if is_kept and "is_causal" not in node.kwargs else None  # type: ignore[return-value]


def inputs_of(flow: TraceFlow, node: fx.Node) -> list[fx.Node]:
    """Return a call's inputs, but for a mask that becomes a flag."""
    mask = simple_mask(flow, node)
    return [x for x in node.all_input_nodes if x is not mask]


def _needed(
    needs: Mapping[fx.Node, tuple[fx.Node, ...]],
    wanted: Iterable[fx.Node],
    is_in: Callable[[fx.Node], bool],
) -> set[fx.Node]:
    """Return the nodes of one sort that the wanted nodes need, directly or not."""
    found: set[fx.Node] = set()
    waiting = list(wanted)
    while waiting:
        for node in needs.get(waiting.pop(), ()):
            if node not in found and is_in(node):
                found.add(node)
                waiting.append(node)
    return found
