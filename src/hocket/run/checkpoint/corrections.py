"""Saves and restores the state of delayed stages' corrections, by weight.

A correction of the same kind is restored weight by weight, in whatever stages they are
now. It starts empty for a weight that had none, or had one of another kind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from hocket.run.checkpoint.format.manifest import CorrectionRecord, Section
from hocket.run.checkpoint.format.opened import OpenedCheckpoint, TensorLocation
from hocket.run.checkpoint.stale_weights import by_age, form_checked, like, names_by_age
from hocket.run.weights.correction.correction import Correction, CorrectionState
from hocket.run.weights.updater import Updater


@dataclass(frozen=True, slots=True)
class ResumedCorrection:
    """The state from which a stage's correction resumes.

    Args:
        num_updates: the updates that it has seen.
        names: the names in the checkpoint of the weights that it has corrected, by the
            model's names.
    """

    num_updates: int
    names: Mapping[str, str]


def corrected(updater: Updater) -> CorrectionRecord | None:
    """Return the record of a stage's correction, beside its tensors."""
    if updater.correction is None:
        return None
    state = updater.correction.state_dict()
    return CorrectionRecord(_kind(updater.correction), state["num_updates"])


def kept_tensors(
    updaters: Iterable[Updater], held: Collection[str]
) -> dict[str, Tensor]:
    """Return the corrections' tensors, by name and age; nothing is copied.

    Args:
        updaters: the updaters of this worker's stages.
        held: the names of the weights whose tensors are wanted.
    """
    return {
        key: x.detach()
        for updater in updaters
        if updater.correction is not None
        for name, kept in updater.correction.state_dict()["kept"].items()
        if name in held
        for key, x in by_age(name, kept)
    }


def resumed_correction(
    opened: OpenedCheckpoint, names: Mapping[str, str], updater: Updater
) -> ResumedCorrection:
    """Return the state of a stage's correction in a checkpoint.

    Args:
        opened: the checkpoint.
        names: the weights' names there, by the model's names.
        updater: the stage's updater.
    """
    if updater.correction is None:
        return ResumedCorrection(0, {})
    kind = _kind(updater.correction)
    seen = {
        name: updates.correction.num_updates
        for part in opened.parts
        for updates in part.updates
        if updates.correction is not None and updates.correction.kind == kind
        for group in updates.groups
        for name in group.parameters
    }
    own = {name: names[name] for name in updater.parameters if names[name] in seen}
    num_updates = max((seen[stored] for stored in own.values()), default=0)
    return ResumedCorrection(num_updates, own)


def kept_places(
    opened: OpenedCheckpoint, resumed: ResumedCorrection
) -> dict[str, TensorLocation]:
    """Return the locations of a correction's tensors, by their names there.

    Raises:
        DamagedError: a tensor has another form than its weight.
    """
    weights = opened.locations(Section.WEIGHTS)
    kept = opened.locations(Section.CORRECTION)
    found: dict[str, TensorLocation] = {}
    for stored in resumed.names.values():
        found |= form_checked(kept, names_by_age(kept, stored), weights[stored])
    return found


def load_kept(
    updater: Updater, resumed: ResumedCorrection, tensors: Mapping[str, Tensor]
) -> None:
    """Restore a stage's correction, or start with an empty one.

    Args:
        updater: the stage's updater.
        resumed: the state in the checkpoint.
        tensors: the tensors that were read, by their names in the checkpoint.
    """
    if updater.correction is None:
        return
    kept = {
        name: [
            like(updater.parameters[name], tensors[key])
            for key in names_by_age(tensors, stored)
        ]
        for name, stored in resumed.names.items()
    }
    state = CorrectionState(num_updates=resumed.num_updates, kept=kept)
    updater.correction.load_state_dict(state)


def _kind(correction: Correction) -> str:
    return type(correction).__qualname__
