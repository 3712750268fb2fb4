"""The dependencies of a trace's calls, and which values cross each cut.

Calls are of three sorts:

    shape-only   computed from nothing but the number of samples and constants: causal
                 masks, position ids. Computed once per number of samples and kept.
    batch-only   computed from the batch alone, without parameters or random numbers:
                 a padding mask. Every stage that needs it computes it itself, because
                 every worker has the batch.
    compute      all others. A cut lies between two of them.

    position     0   1   2   3   4
    compute        a   b   c   d         the cut at 2 sends what a and b made and
                         ^               c, d or the output need
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from hocket.errors import CaptureError
from hocket.model.trace.observe import NodeFacts, Observation, TensorInfo
from hocket.model.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class TraceFlow:
    """The dependencies of one trace.

    Args:
        trace: the trace.
        facts: what each call did.
        needs: the nodes that must run before each call: those it reads, and those that
            change memory it reads.
        compute: the calls that belong to exactly one stage, in order.
        shape_only: the calls that see neither the batch nor parameters.
        crossing: per position, the calls whose values are sent if it is cut there.
        is_admissible: per position, whether a cut there is right.
        changed: the first names of the buffers that some call may change.
    """

    trace: Trace
    facts: Mapping[fx.Node, NodeFacts]
    needs: Mapping[fx.Node, tuple[fx.Node, ...]]
    compute: tuple[fx.Node, ...]
    shape_only: frozenset[fx.Node]
    crossing: tuple[tuple[fx.Node, ...], ...]
    is_admissible: tuple[bool, ...]
    changed: frozenset[str]

    def seen(self, node: fx.Node) -> TensorInfo:
        """Return the shape and type of a value that crosses."""
        seen = self.facts[node].structure
        assert isinstance(seen, TensorInfo)
        return seen


def flow_of(trace: Trace, seen: Observation) -> TraceFlow:
    """Sort the calls into kinds, and find where they can be cut.

    Raises:
        CaptureError: the model changes a tensor of the batch in place.
    """
    _refuse_changed_batch(trace, seen)
    needs = _needs(trace, seen.facts)
    changed = _changed_buffers(trace, seen)
    own = [x for x in trace.calls if _is_own_work(trace, seen.facts[x], x, changed)]
    compute = _spread(trace, seen.facts, needs, own)
    batch_only = _spread(trace, seen.facts, needs, trace.leaf_of)
    order = tuple(node for node in trace.calls if node in compute)
    crossing = _crossing(order)
    return TraceFlow(
        trace,
        seen.facts,
        needs,
        order,
        frozenset(x for x in trace.calls if x not in compute and x not in batch_only),
        crossing,
        _admissible(trace, seen.facts, order, crossing, changed),
        changed,
    )


def _refuse_changed_batch(trace: Trace, seen: Observation) -> None:
    for node in trace.calls:
        for leaf in trace.leaf_of:
            if seen.memory[leaf] & seen.facts[node].writes:
                raise CaptureError(
                    f"the model changes its input {leaf.name} in place, in "
                    f"{trace.path_of(node) or 'its forward'} ({node.target}); other "
                    "stages read the same input: let it work on a copy"
                )


def _needs(
    trace: Trace, facts: Mapping[fx.Node, NodeFacts]
) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Return, for each node, what it reads, and which calls change that memory."""
    writers: dict[int, list[fx.Node]] = {}
    needs = {}
    for node in (*trace.calls, trace.output):
        inputs = node.all_input_nodes
        touched = {memory for x in inputs if x in facts for memory in facts[x].makes}
        behind = [writer for memory in touched for writer in writers.get(memory, ())]
        needs[node] = tuple(dict.fromkeys([*inputs, *behind]))
        for memory in facts[node].writes if node in facts else ():
            writers.setdefault(memory, []).append(node)
    return needs


def _changed_buffers(trace: Trace, seen: Observation) -> frozenset[str]:
    """Return the buffers that some call changes."""
    written = {memory for facts in seen.facts.values() for memory in facts.writes}
    changed = {str(x.target) for x, memory in seen.memory.items() if memory & written}
    for node in trace.calls:
        # A batch norm's running statistics change invisibly to the trace, as does
        # anything inside a module that is run as it is.
        if node.op == "call_module" or "batch_norm" in str(node.target):
            changed.update(trace.reads(node))
    return frozenset(x for x in changed if not trace.state.is_parameter(x))


def _is_own_work(
    trace: Trace, facts: NodeFacts, node: fx.Node, changed: frozenset[str]
) -> bool:
    if node.op == "call_module" or facts.is_random:
        return True
    return any(trace.state.is_parameter(x) or x in changed for x in trace.reads(node))


def _spread(
    trace: Trace,
    facts: Mapping[fx.Node, NodeFacts],
    needs: Mapping[fx.Node, tuple[fx.Node, ...]],
    origin: Iterable[fx.Node],
) -> set[fx.Node]:
    """Return the origin, its dependents, and calls whose memory these change."""
    found = set(origin)
    before = -1
    while len(found) != before:  # a late write can reach back to an early call
        before = len(found)
        written = {x for node in found if node in facts for x in facts[node].writes}
        for node in trace.calls:
            if found.intersection(needs[node]) or written & facts[node].touches:
                found.add(node)
    return found


def _crossing(order: tuple[fx.Node, ...]) -> tuple[tuple[fx.Node, ...], ...]:
    """Return, for each position, values made before it and needed behind it."""
    end = len(order)
    place = {node: i for i, node in enumerate(order)}
    last = {
        node: max((place.get(user, end) for user in node.users), default=-1)
        for node in order
    }
    alive: list[fx.Node] = []
    crossing = []
    for position, node in enumerate(order):
        alive = [value for value in alive if last[value] >= position]
        crossing.append(tuple(alive))
        alive.append(node)
    return (*crossing, ())


def _admissible(
    trace: Trace,
    facts: Mapping[fx.Node, NodeFacts],
    order: tuple[fx.Node, ...],
    crossing: tuple[tuple[fx.Node, ...], ...],
    changed: frozenset[str],
) -> tuple[bool, ...]:
    """Return whether only tensors cross, and none of them is changed later.

    A received tensor is a copy: a change to it would not reach what shared its memory.
    """
    later: set[int] = set()
    admissible = [False] * (len(order) + 1)
    for position in range(len(order) - 1, 0, -1):
        later |= facts[order[position]].writes
        values = [facts[node] for node in crossing[position]]
        is_changed = any(value.makes & later for value in values)
        are_tensors = all(isinstance(value.structure, TensorInfo) for value in values)
        admissible[position] = bool(values) and are_tensors and not is_changed
    for first, last in _spans(trace, order, changed):
        admissible[first + 1 : last + 1] = [False] * (last - first)
    return tuple(admissible)


def _spans(
    trace: Trace, order: tuple[fx.Node, ...], changed: frozenset[str]
) -> Iterator[tuple[int, int]]:
    """Yield the range in which each changed buffer is used: it must be in one stage."""
    users: dict[str, list[int]] = {}
    for place, node in enumerate(order):
        for name in changed.intersection(trace.reads(node)):
            users.setdefault(name, []).append(place)
    for places in users.values():
        yield places[0], places[-1]
