"""Aligns two traces: training and evaluation are captured separately.

The two differ where the model's code depends on its mode: a dropout is gone, a mask is
made in another way. A cut is right only at the same place in both:

    training     a  b  dropout  c | d        the cut may lie before d, whose partner
    evaluation   a  b           c | d        crosses the same values
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher

from torch import fx

from hocket.model.trace.flow import TraceFlow
from hocket.model.trace.trace import Trace


def partners(training: TraceFlow, evaluation: TraceFlow) -> dict[fx.Node, fx.Node]:
    """Return, for each training call, the evaluation call that does the same."""
    a = [_kind(training.trace, node) for node in training.compute]
    b = [_kind(evaluation.trace, node) for node in evaluation.compute]
    if a == b:
        return dict(zip(training.compute, evaluation.compute, strict=True))
    found = {}
    for block in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
        for i in range(block.size):
            found[training.compute[block.a + i]] = evaluation.compute[block.b + i]
    return found


def same_places(
    training: TraceFlow, evaluation: TraceFlow, partner_of: Mapping[fx.Node, fx.Node]
) -> dict[int, int]:
    """Return positions at which both can be cut with the same values."""
    place = {node: i for i, node in enumerate(evaluation.compute)}
    found = {}
    for position, node in enumerate(training.compute):
        before = training.compute[position - 1]
        if node in partner_of:
            other = place[partner_of[node]]
        elif before in partner_of:  # the next call is in training only
            other = place[partner_of[before]] + 1
        else:
            continue
        both = training.is_admissible[position] and evaluation.is_admissible[other]
        if both and _same_values(training, position, evaluation, other, partner_of):
            found[position] = other
    return found


def _same_values(
    training: TraceFlow,
    position: int,
    evaluation: TraceFlow,
    other: int,
    partner_of: Mapping[fx.Node, fx.Node],
) -> bool:
    crossing = [partner_of.get(value) for value in training.crossing[position]]
    if set(crossing) != set(evaluation.crossing[other]):
        return False
    pairs = zip(training.crossing[position], crossing, strict=True)
    return all(
        value is not None
        and training.seen(node).shape == evaluation.seen(value).shape
        and training.seen(node).dtype == evaluation.seen(value).dtype
        for node, value in pairs
    )


def _kind(trace: Trace, node: fx.Node) -> tuple[str, str, tuple[str, ...]]:
    """Return a key that is equal for the same call in both traces."""
    return str(node.target), trace.path_of(node), trace.reads(node)
