"""List every access of every op, as columns of numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from hocket.core.accesses import Resource, access_rules
from hocket.core.program import Program
from hocket.core.simulator.columns import KINDS, Columns
from hocket.core.timelines.arrays import Bools, Ints

RESOURCES: Final = tuple(Resource)


@dataclass(frozen=True, slots=True, eq=False)
class Accesses:
    """Every access of every op, in no order; one row each.

    Args:
        row: the op's row.
        resource: the place of what is used in `RESOURCES`.
        stage: the stage that owns it.
        number: as in `Access`.
        writes: whether it is changed.
    """

    row: Ints
    resource: Ints
    stage: Ints
    number: Ints
    writes: Bools

    def of(self, resource: Resource) -> Bools:
        """Select the accesses of one resource."""
        found: Bools = self.resource == RESOURCES.index(resource)
        return found

    def taken(self, which: Bools | Ints) -> Accesses:
        """Return a selection of the accesses."""
        return Accesses(*(getattr(self, column.name)[which] for column in fields(self)))


def find_accesses(columns: Columns, program: Program) -> Accesses:
    """Fill in the rules of access for every op of a schedule."""
    key = columns.kind * program.num_stages + columns.stage
    order = np.argsort(key, kind="stable")
    present, first = np.unique(key[order], return_index=True)
    found: dict[str, list[Ints]] = {column.name: [] for column in fields(Accesses)}
    for code, rows in zip(present.tolist(), np.split(order, first[1:]), strict=True):
        kind, stage = divmod(code, program.num_stages)
        for rule in access_rules(KINDS[kind], stage, program):
            step = columns.step[rows] + rule.shift
            found["row"].append(rows)
            found["resource"].append(0 * rows + RESOURCES.index(rule.resource))
            found["stage"].append(0 * rows + rule.stage)
            found["number"].append(np.maximum(0, step) * rule.is_numbered)
            found["writes"].append(0 * rows + rule.writes)
    none = np.zeros(0, np.int64)
    joined = {name: np.concatenate([none, *parts]) for name, parts in found.items()}
    writes = joined.pop("writes").astype(bool)
    return Accesses(**joined, writes=writes)
