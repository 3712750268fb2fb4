"""Assembles a stage's optimizer state from those of the stages of another cut.

    saved    stage 0: group 0 {a, b}, group 1 {c}     stage 1: group 0 {d}
    now      one stage: group 0 {a, b, d}, group 1 {c}

A parameter keeps its state, and its group's options: all parameters of a
group must have had the same. A schedule keeps some numbers per group, which follow it.
Parameters that were frozen by a policy had neither: they begin with zero moments, in
the group of those that were trained, or in the saved group of their own group's number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hocket.errors import CheckpointError
from hocket.run.checkpoint.format.manifest import UpdateRecord, WorkerPart

# What the schedules of torch keep as a list with an entry per group.
_PER_GROUP: Final = frozenset(
    {
        "base_lrs",
        "_last_lr",
        "lr_lambdas",
        "max_lrs",
        "min_lrs",
        "base_momentums",
        "max_momentums",
    }
)


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """The place of a parameter when it was saved.

    Args:
        updates: the record of its stage's optimizer.
        group: its group there.
    """

    updates: UpdateRecord
    group: int


@dataclass(frozen=True, slots=True)
class RegroupedUpdates:
    """The state for a stage's optimizer and schedule, still as JSON.

    Args:
        options: the options of each group.
        states: the state of each parameter, by the model's name.
        scheduler: the schedule's state.
    """

    options: tuple[Mapping[str, Any], ...]
    states: Mapping[str, Any]
    scheduler: Any


class SavedUpdates:
    """All saved optimizer state, by parameter.

    Args:
        parts: the checkpoint's parts.
        names: the names in the checkpoint, by the model's names.
        frozen: the parameters that a policy had frozen, by their names there.
    """

    def __init__(
        self,
        parts: Iterable[WorkerPart],
        names: Mapping[str, str],
        frozen: Collection[str] = (),
    ) -> None:
        self._names = names
        self._frozen = frozenset(frozen)
        self._records: list[UpdateRecord] = []
        self._homes: dict[str, SavedParameter] = {}
        self._states: dict[str, Any] = {}
        for part in parts:
            for updates in part.updates:
                self._records.append(updates)
                self._states.update(updates.states)
                for i, group in enumerate(updates.groups):
                    for name in group.parameters:
                        self._homes.setdefault(name, SavedParameter(updates, i))

    def regrouped(
        self, groups: Sequence[Sequence[str]], optimizer: str, scheduler: str | None
    ) -> RegroupedUpdates:
        """Return the state for an optimizer with these groups of parameters.

        Args:
            groups: the names of each group's parameters.
            optimizer: the optimizer's class.
            scheduler: the schedule's class.

        Raises:
            CheckpointError: a parameter was not trained when it was saved, those of a
                group had different options, or another optimizer trained them.
        """
        trained = [
            [x for x in own if self._names[x] not in self._frozen] for own in groups
        ]
        homes = [
            [self._saved_parameter(name) for name in names]
            or self._of_group(i, len(groups) if own else 0)
            for i, (names, own) in enumerate(zip(trained, groups, strict=True))
        ]
        for home in (home for own in homes for home in own):
            saved = home.updates
            if (saved.optimizer, saved.scheduler) != (optimizer, scheduler):
                raise CheckpointError(
                    f"saved with {saved.optimizer} and {saved.scheduler or 'no'} "
                    f"learning-rate schedule, to be loaded into {optimizer} and "
                    f"{scheduler or 'no'} schedule: take the same as then"
                )
        options = [
            self._options(names, own) if own else {}
            for names, own in zip(trained, homes, strict=True)
        ]
        states = {
            name: self._states[self._names[name]]
            for names in groups
            for name in names
            if self._names[name] in self._states
        }
        return RegroupedUpdates(tuple(options), states, _scheduler(homes))

    def _of_group(self, number: int, num_groups: int) -> list[SavedParameter]:
        """Return a place in any saved group of a number; all were frozen here."""
        for updates in self._records:
            if len(updates.groups) == num_groups:
                return [SavedParameter(updates, number)]
        return []

    def _saved_parameter(self, name: str) -> SavedParameter:
        home = self._homes.get(self._names[name])
        if home is None:
            raise CheckpointError(
                f"{name} wants a gradient, but was not trained when the checkpoint was "
                "saved: freeze the same parameters as then, or load the weights alone "
                "(hocket.checkpoint.read_weights) into the model first"
            )
        return home

    def _options(
        self, names: Sequence[str], homes: list[SavedParameter]
    ) -> dict[str, Any]:
        found = [home.updates.groups[home.group].options for home in homes]
        for name, options in zip(names, found, strict=False):  # none if all were frozen
            if options != found[0]:
                key = next(x for x in found[0] if options.get(x) != found[0][x])
                raise CheckpointError(
                    f"{names[0]} and {name} are in one group of the optimizer, but had "
                    f"different options when they were saved ({key}: {found[0][key]} "
                    f"and {options.get(key)}): group them as then"
                )
        return found[0]


def _scheduler(homes: Sequence[Sequence[SavedParameter]]) -> Any:
    """Return the schedule's state for groups of these saved parameters."""
    known = [own[0] for own in homes if own]
    if not known:
        return None
    picks = [own[0] if own else known[0] for own in homes]
    in_place = all(
        not own or (pick.group == i and len(pick.updates.groups) == len(homes))
        for i, (own, pick) in enumerate(zip(homes, picks, strict=True))
    )
    states = [home.updates.scheduler_state for home in picks]
    if in_place and all(state == states[0] for state in states):
        return states[0]
    if states[0] is None:
        return None
    return _rearranged(states, [pick.group for pick in picks])


def _rearranged(states: Sequence[dict[str, Any]], groups: Sequence[int]) -> Any:
    made: dict[str, Any] = {}
    for key, value in states[0].items():
        others = [state.get(key) for state in states]
        if key in _PER_GROUP and isinstance(value, list):
            made[key] = [x[i] for x, i in zip(others, groups, strict=True) if x]
        elif key == "_schedulers":
            made[key] = [
                _rearranged([x[i] for x in others if x], groups)
                for i in range(len(value))
            ]
        elif any(other != value for other in others):
            raise CheckpointError(
                f"the learning-rate schedules of two stages differ in {key} ({value} "
                f"and {next(x for x in others if x != value)}), so they cannot become "
                "one: load into as many stages as saved"
            )
        else:
            made[key] = value
    return made
