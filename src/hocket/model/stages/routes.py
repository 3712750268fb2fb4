"""Routes values between stages, along the program's flows.

A value goes along the shortest path of flows from the stage that makes it to each
stage that reads it, and enters each stage by one flow only:

    flows          0 ─▶ 1 ─▶ 2 ─▶ 3       0 ──────▶ 2 is a flow, too
    x, read by 2   0 ────────▶ 2          sent once, directly
    x, read by 3   0 ────────▶ 2 ─▶ 3     stage 2 relays it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from hocket.errors import ModelError
from hocket.model.capture.captured import Captured

Flows = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Routes:
    """The values that go along each flow, by the calls in training that make them.

    Args:
        received: per stage, per stage that it receives from, the values in the order
            in which the model makes them. Flows without values are included.
        sent: per stage, per stage that it sends to, the same values.
    """

    received: tuple[Mapping[int, tuple[fx.Node, ...]], ...]
    sent: tuple[Mapping[int, tuple[fx.Node, ...]], ...]


def routes(captured: Captured, starts: Sequence[int], flows: Flows) -> Routes:
    """Find the path of each value that crosses a cut.

    Args:
        captured: the model.
        starts: the layers at which stages 0, 1, ... begin.
        flows: `(from_stage, to_stage)`, each from a lower to a higher number.

    Raises:
        ModelError: no path of flows leads from a value's maker to a reader; or a flow
            leads backwards, or to a stage that there is not.
    """
    num_stages = len(starts)
    for source, target in flows:
        if not 0 <= source < target < num_stages:
            raise ModelError(
                f"flow {source} -> {target} must lead from a lower to a higher stage "
                f"of the {num_stages}"
            )
    along: dict[tuple[int, int], list[fx.Node]] = {flow: [] for flow in sorted(flows)}
    for node, (maker, readers) in _crossings(captured, starts).items():
        parents = _parents(maker, along)
        used: dict[tuple[int, int], None] = {}
        for reader in readers:
            while reader != maker:
                if reader not in parents:
                    name = captured.values[node].name
                    raise ModelError(_no_path(name, maker, reader, along))
                used[parents[reader], reader] = None
                reader = parents[reader]
        for flow in used:
            along[flow].append(node)
    return Routes(
        tuple(
            {a: tuple(x) for (a, b), x in along.items() if b == stage}
            for stage in range(num_stages)
        ),
        tuple(
            {b: tuple(x) for (a, b), x in along.items() if a == stage}
            for stage in range(num_stages)
        ),
    )


def _crossings(
    captured: Captured, starts: Sequence[int]
) -> dict[fx.Node, tuple[int, list[int]]]:
    """Return, for each value that crosses a cut, its maker and its readers.

    A stage reads a value if it does in either mode.
    """
    stage_of: dict[fx.Node, int] = {}
    for mode, flow in enumerate((captured.training, captured.evaluation)):
        begins = [captured.starts[layer][mode] for layer in starts]
        ends = (*begins[1:], len(flow.compute))
        for stage, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            stage_of.update(dict.fromkeys(flow.compute[begin:end], stage))
    last = len(starts) - 1
    found = {}
    order = captured.training.crossing
    crossing = (x for layer in starts[1:] for x in order[captured.starts[layer][0]])
    for node in dict.fromkeys(crossing):
        users = (*node.users, *captured.partner_of[node].users)
        readers = {stage_of.get(user, last) for user in users} - {stage_of[node]}
        found[node] = stage_of[node], sorted(readers)
    return found


def _parents(maker: int, flows: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return each stage's predecessor on a shortest path from the maker.

    Of several shortest paths, the one through the lowest stages is taken.
    """
    parents: dict[int, int] = {}
    front = [maker]
    while front:
        reached = []
        for source, target in flows:
            if source in front and target not in parents:
                parents[target] = source
                reached.append(target)
        front = reached
    return parents


def _no_path(
    name: str, maker: int, reader: int, flows: Iterable[tuple[int, int]]
) -> str:
    listed = ", ".join(f"{a} -> {b}" for a, b in flows) or "none"
    return (
        f"stage {reader} reads {name}, which stage {maker} makes, and no path of flows "
        f"leads there (the flows are {listed}): add the flow {maker} -> {reader}"
    )


def chain(num_stages: int) -> Iterator[tuple[int, int]]:
    """Yield the flows of a chain of stages."""
    return ((stage, stage + 1) for stage in range(num_stages - 1))
