"""Selects the calls that a stage runs in one mode, and their inputs.

A module that is to run as it is replaces the calls inside of it, if they are all in
this stage; else the nearest module around it does for which that holds:

    as it is   calls of the stage
               norm  linear  gelu  linear  add
    mlp        norm  [      mlp        ]  add
    gelu       norm  linear [gelu] linear add
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, fx

from hocket.model.trace.flow import TraceFlow
from hocket.model.trace.trace import CallSpan

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
        spans: the calls of modules that run as they are, by the call of the body that
            stands for all calls inside.
    """

    flow: TraceFlow
    is_last: bool
    body: tuple[fx.Node, ...]
    kept: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    masks: tuple[fx.Node, ...]
    spans: Mapping[fx.Node, CallSpan]

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
    def inside(self) -> list[fx.Node]:
        """The calls inside of the modules that run as they are."""
        members = self.flow.trace.members if self.spans else {}
        return [x for span in self.spans.values() for x in members[span.key]]

    @property
    def constants(self) -> tuple[fx.Node, ...]:
        """The body's inputs that `kept` makes, besides masks."""
        return tuple(node for node in self.reads if self._is_constant(node))

    @property
    def uses_num_samples(self) -> bool:
        """Whether anything in it depends on the number of samples."""
        return self._uses(self.flow.trace.num_samples)

    @property
    def lengths(self) -> frozenset[tuple[int, int]]:
        """The open sizes that something in it depends on, by leaf and dimension."""
        sizes = self.flow.trace.lengths.items()
        return frozenset(place for place, node in sizes if self._uses(node))

    def _uses(self, size: fx.Node) -> bool:
        return size in self.reads or any(size in x.all_input_nodes for x in self.kept)

    def _is_constant(self, node: fx.Node) -> bool:
        trace = self.flow.trace
        is_made = node in self.flow.shape_only or node in trace.sizes
        return is_made or isinstance(trace.objects.get(str(node.target)), Tensor)


def part_of(
    flow: TraceFlow,
    start: int,
    end: int,
    received: Collection[fx.Node] = (),
    as_is: Collection[str] = (),
) -> Part:
    """Return the part between two positions.

    Args:
        flow: the whole model's dependencies in one mode.
        start: the position at which the stage begins.
        end: the position at which the next one begins.
        received: the values that come from other stages.
        as_is: the paths of modules that are to run as they are.
    """
    calls = flow.trace.calls
    is_last = end == len(flow.compute)
    whole = _whole_spans(flow, frozenset(flow.compute[start:end]), received, as_is)
    inside = {x: members[0] for members in whole.values() for x in members}
    spans = {members[0]: flow.trace.spans[key] for key, members in whole.items()}
    own = {inside.get(x, x) for x in flow.compute[start:end]}
    ends = (flow.trace.output,) if is_last else ()

    def needs(node: fx.Node) -> Iterable[fx.Node]:
        if node in spans:
            return (x for x in spans[node].given if isinstance(x, fx.Node))
        return (inside.get(x, x) for x in flow.needs.get(node, ()))

    repeatable = frozenset(calls).difference(flow.compute, flow.shape_only, inside)
    repeated = _needed(needs, (*own, *ends), repeatable.__contains__)
    body = tuple(node for node in calls if node in own or node in repeated)
    kept = _needed(needs, (*body, *ends), flow.shape_only.__contains__)
    made = {*body, *inside}
    inputs = (
        needs(node) if node in spans else inputs_of(flow, node)
        for node in (*body, *ends)
    )
    reads = dict.fromkeys(x for given in inputs for x in given if x not in made)
    plain = (x for x in body if x not in spans)
    masks = dict.fromkeys(mask for x in plain if (mask := simple_mask(flow, x)))
    return Part(
        flow,
        is_last,
        body,
        tuple(node for node in calls if node in kept),
        tuple(reads),
        tuple(masks),
        spans,
    )


def _whole_spans(
    flow: TraceFlow,
    own: Collection[fx.Node],
    received: Collection[fx.Node],
    as_is: Collection[str],
) -> dict[str, list[fx.Node]]:
    """Return the outermost calls that run as they are, with all calls inside of them.

    For each call of a module in `as_is`, that is itself or the nearest call around it
    that this stage can make.
    """
    if not as_is:
        return {}
    members = flow.trace.members
    found: dict[str, list[fx.Node]] = {}
    for key, span in flow.trace.spans.items():
        if span.path not in as_is or flow.trace.runs_as_is(key):
            continue
        around = (key, *reversed(span.around))
        known = (x for x in around if _can_run(flow, x, own, received))
        if (best := next(known, None)) is not None:
            found[best] = members[best]
    return {
        key: nodes
        for key, nodes in found.items()
        if not any(x in found for x in flow.trace.spans[key].around)
    }


def _can_run(
    flow: TraceFlow, key: str, own: Collection[fx.Node], received: Collection[fx.Node]
) -> bool:
    """Return whether a stage can call a module in place of the calls inside of it."""
    span, members = flow.trace.spans[key], flow.trace.members.get(key, [])
    inside = frozenset(members)
    compute = inside.intersection(flow.compute)
    if not (span.is_known and compute and compute <= frozenset(own)):
        return False
    elsewhere = frozenset(flow.compute).difference(own, received)
    given = [x for x in span.given if isinstance(x, fx.Node)]
    if elsewhere.intersection(given):
        return False
    made = frozenset(span.out.values())
    if any(x not in made and not inside.issuperset(x.users) for x in members):
        return False
    # What it only passes on has later readers that look like earlier ones.
    order = {node: i for i, node in enumerate(flow.trace.graph.nodes)}
    last = order[members[-1]]
    return all(order[user] <= last for x in made - inside for user in x.users)


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
    needs: Callable[[fx.Node], Iterable[fx.Node]],
    wanted: Iterable[fx.Node],
    is_in: Callable[[fx.Node], bool],
) -> set[fx.Node]:
    """Return the nodes of one sort that the wanted nodes need, directly or not."""
    found: set[fx.Node] = set()
    waiting = list(wanted)
    while waiting:
        for node in needs(waiting.pop()):
            if node not in found and is_in(node):
                found.add(node)
                waiting.append(node)
    return found
