"""Random ops for the lanes of a device, and an oracle of which of them race."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations

from hypothesis import strategies as st

from hocket.run.device.device import Device, IssueOrder
from hocket.run.device.sanitize import Sanitizer


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """One op: its lane, the ops of other lanes that it waits for, and its accesses.

    Args:
        number: position in a topological order of all ops.
        lane: the number of its lane.
        waits: numbers of earlier ops, each of which records an event.
        accesses: pairs of a resource and whether it is written.
    """

    number: int
    lane: int
    waits: frozenset[int]
    accesses: tuple[tuple[str, bool], ...]

    @property
    def label(self) -> str:
        """The op's text in errors."""
        return f"op{self.number}"


@st.composite
def lane_plans(draw: st.DrawFn, num_lanes: int = 3) -> list[PlannedOp]:
    """Up to eight ops with random lanes, waits and accesses to two resources."""
    plan: list[PlannedOp] = []
    for number in range(draw(st.integers(2, 8))):
        lane = draw(st.integers(0, num_lanes - 1))
        others = [op.number for op in plan if op.lane != lane]
        waits = draw(st.sets(st.sampled_from(others), max_size=2)) if others else set()
        access = st.tuples(st.sampled_from("xy"), st.booleans())
        accesses = draw(st.lists(access, max_size=2))
        plan.append(PlannedOp(number, lane, frozenset(waits), tuple(accesses)))
    return plan


def racing_pairs(plan: list[PlannedOp]) -> set[tuple[str, str]]:
    """All pairs of ops that conflict and that no path orders, by transitive closure."""
    before: dict[int, set[int]] = {}
    last: dict[int, int] = {}
    for op in plan:
        direct = op.waits | ({last[op.lane]} if op.lane in last else set())
        before[op.number] = set(direct).union(*(before[i] for i in direct))
        last[op.lane] = op.number
    return {
        (a.label, b.label)
        for a, b in combinations(plan, 2)
        if a.number not in before[b.number] and conflict(a, b)
    }


def conflict(a: PlannedOp, b: PlannedOp) -> bool:
    """Whether both use one resource, and one of them writes it."""
    return any(
        x == y and (x_writes or y_writes)
        for x, x_writes in a.accesses
        for y, y_writes in b.accesses
    )


def in_issue_order(plan: list[PlannedOp], order: IssueOrder) -> Iterator[PlannedOp]:
    """The ops in the order in which the host must submit them."""
    match order:
        case IssueOrder.TOPOLOGICAL:
            yield from plan
        case IssueOrder.SIDE_LANES_FIRST:
            yield from (op for op in plan if op.lane)
            yield from (op for op in plan if not op.lane)


def play(plan: list[PlannedOp], device: Device, sanitizer: Sanitizer) -> list[str]:
    """Run a plan, and return the labels in the order in which the ops ran.

    Raises:
        RaceError: the sanitizer has found a race.
    """
    events = {op.number: device.new_event() for op in plan}
    ran: list[str] = []

    def work(op: PlannedOp) -> None:
        ran.append(op.label)
        for resource, writes in op.accesses:
            sanitizer.access(op.lane, op.label, resource, writes=writes)

    for op in in_issue_order(plan, device.issue_order):
        device.lanes[op.lane].submit(
            partial(work, op),
            waits=[events[i] for i in sorted(op.waits)],
            records=[events[op.number]],
            label=op.label,
        )
    device.synchronize(10.0)
    return ran
