"""Find what a gate's updates wait for: the last gradient op of each lane.

d0  0F0 0F1 0B0 0B1 0U           one gate over both stages
d1  1F0 1B0 1F1 1B1 .... 1U      1U waits for 0B1, which ends last
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from hocket.core.gates import Gates
from hocket.core.op import ASYNCHRONOUS, Kind
from hocket.core.simulator.columns import CODES, Columns
from hocket.core.simulator.needs import Needs
from hocket.core.timelines.arrays import Ints


def gate_waits(columns: Columns, needs: Needs, gates: Gates) -> tuple[Ints, Ints]:
    """Return pairs of rows, in two columns: an update, and an op that it waits for.

    Args:
        columns: the ops.
        needs: what each op needs itself.
        gates: the stages whose gradients are judged together.
    """
    lane = columns.lane.tolist()
    # The lane goes on before such an op has ended.
    is_asynchronous = columns.is_any(ASYNCHRONOUS).tolist()
    pairs = [
        (update, maker)
        for updates in _gates_in_steps(columns, gates)
        for maker in _last_makers(needs, updates, lane, is_asynchronous)
        for update in updates
        if lane[maker] != lane[update] or maker > update or is_asynchronous[maker]
    ]
    rows, makers = np.array(pairs, np.int64).reshape(-1, 2).T
    return rows, makers


def _gates_in_steps(columns: Columns, gates: Gates) -> Iterator[list[int]]:
    """Yield the updates of each gate in each step."""
    several = (gate for gate in gates if len(gate) > 1)
    gate_of = {stage: number for number, gate in enumerate(several) for stage in gate}
    found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for row in np.flatnonzero(columns.kind == CODES[Kind.UPDATE]).tolist():
        gate = gate_of.get(int(columns.stage[row]))
        if gate is not None:
            found[gate, int(columns.step[row])].append(row)
    yield from found.values()


def _last_makers(
    needs: Needs, updates: list[int], lane: list[int], is_asynchronous: list[bool]
) -> list[int]:
    """Return of each lane the last op, and the last collective, that updates need."""
    last: dict[tuple[int, bool], int] = {}
    begins = np.searchsorted(needs.row, updates).tolist()
    ends = np.searchsorted(needs.row, updates, side="right").tolist()
    for begin, end in zip(begins, ends, strict=True):
        for maker in needs.maker[begin:end].tolist():
            if maker >= 0:
                key = lane[maker], is_asynchronous[maker]
                last[key] = max(last.get(key, maker), maker)
    return [*last.values()]
