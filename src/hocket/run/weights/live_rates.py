"""Detects learning rates that differ by rank, at every update.

Each stage has its own optimizer and schedule, in its own process. Scheduled rates may
differ by stage; the factor live rate / scheduled rate may not. Behind its gradients'
norms, each stage sends two groups: those with the smallest and the largest factor.

    stage   group   live     scheduled  factor
      0       0     0.001      0.001      1
      1       0     0.0005     0.001      0.5: changed by hand on this rank alone

Replicas, which hold the same stages, compare the same numbers with each batch's header.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from hocket.errors import SchemaError
from hocket.run.weights.updater import Updater

_NEAR: Final = 1e-6  # relative; hosts may round a schedule differently
_ROW: Final = 3  # numbers of a group


@dataclass(frozen=True, slots=True)
class _Rate:
    """The learning rate of one group, as a rank has it."""

    stage: int
    rank: int
    group: float
    live: float
    scheduled: float

    @property
    def factor(self) -> float:
        """How many times the scheduled rate it is."""
        return _factor(self.live, self.scheduled)

    def __str__(self) -> str:
        return (
            f"group {self.group - 1:.0f} of stage {self.stage} on rank {self.rank} has "
            f"{self.live:.6g} ({self.factor:.6g} times its scheduled "
            f"{self.scheduled:.6g})"
        )


@dataclass(frozen=True, slots=True)
class LiveRates:
    """Compares live with scheduled learning rates over all stages.

    Args:
        updaters: the updaters whose rates this worker sends, by stage.
        nets: the net of each stage; rates of different nets are not compared.
        ranks: the rank of each stage, in the first replica.
    """

    updaters: Mapping[int, Updater]
    nets: Sequence[str]
    ranks: Sequence[int]

    @property
    def num_numbers(self) -> int:
        """How many numbers all stages have."""
        return 2 * _ROW * len(self.nets)

    def numbers(self) -> list[float]:
        """Return `[group + 1, live rate, scheduled rate]` of two groups per stage.

        They are zero for stages whose rates this worker does not send; groups of
        which a stage has no parameter do not count.
        """
        found = [0.0] * self.num_numbers
        for stage, updater in self.updaters.items():
            live, scheduled = updater.rates(), updater.scheduled_rates
            optimizer = updater.optimizer
            groups = [] if optimizer is None else optimizer.param_groups
            rates = zip(groups, count(1.0), live, scheduled, strict=False)
            rows = [row for group, *row in rates if group["params"]]
            if live != scheduled:
                rows.sort(key=lambda row: _factor(*row[1:]))
            if rows:
                found[2 * _ROW * stage : 2 * _ROW * (stage + 1)] = *rows[0], *rows[-1]
        return found

    def fault(self, numbers: Sequence[float]) -> str:
        """Describe two stages of a net with different factors; empty if none differ.

        Args:
            numbers: the numbers of all stages.
        """
        if numbers[1::_ROW] == numbers[2::_ROW]:  # all as scheduled
            return ""
        first_of: dict[tuple[str, int], _Rate] = {}
        for i, rate in enumerate(_rates_in(numbers, self.ranks)):
            first = first_of.setdefault((self.nets[rate.stage], i % 2), rate)
            is_same_factor = _is_same(first.factor, rate.factor)
            if not is_same_factor and not _is_same(first.live, rate.live):
                return f"{first}, {rate}"
        return ""

    def refuse_replicas(
        self, step: int, by_rank: Mapping[int, Sequence[float]]
    ) -> None:
        """Refuse replicas whose rates differ.

        Args:
            step: the step whose batch carries the rates.
            by_rank: the numbers of each replica of this device.

        Raises:
            SchemaError: names two ranks, and both rates.
        """
        if len({*map(tuple, by_rank.values())}) == 1:
            return
        ranks = {rank: [rank] * len(self.nets) for rank in by_rank}
        found = [_rates_in(numbers, ranks[rank]) for rank, numbers in by_rank.items()]
        for first, *others in zip(*found, strict=True):
            for other in others:
                is_same_factor = _is_same(first.factor, other.factor)
                if not is_same_factor or not _is_same(first.live, other.live):
                    refuse_rates(f"{first}, {other}", step)


def _rates_in(numbers: Sequence[float], ranks: Sequence[int]) -> list[_Rate]:
    """Return the groups in the numbers of all stages, two for each that posts some."""
    rows = [numbers[i : i + _ROW] for i in range(0, len(numbers), _ROW)]
    return [_Rate(i // 2, ranks[i // 2], *row) for i, row in enumerate(rows) if row[0]]


def refuse_rates(fault: str, step: int) -> None:
    """Raise an error if there is a fault.

    Args:
        fault: how learning rates differ by rank; empty if they do not.
        step: the step whose update uses the rates.

    Raises:
        SchemaError: `fault` is not empty.
    """
    if fault:
        raise SchemaError(
            f"at step {step} the learning rates differ by rank: {fault}. Use the same "
            "scheduler= on every rank; or multiply the rates of all groups by the same "
            "factor, on every rank before the same step"
        )


def _factor(live: float, scheduled: float) -> float:
    if live == scheduled:
        return 1.0
    return live / scheduled if scheduled else math.inf


def _is_same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_NEAR)
