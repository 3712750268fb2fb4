"""What the corrections of delayed stages keep: saved by weight, and given back.

A correction of the same kind goes on where it was, weight by weight, in whatever stages
they are now. Of a weight that had none, and where the kind is another one, it begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from hocket.run.checkpoint.format.manifest import CorrectionRecord, Section
from hocket.run.checkpoint.format.opened import OpenedCheckpoint, TensorLocation
from hocket.run.checkpoint.weight_ages import by_age, form_checked, like, names_by_age
from hocket.run.weights.correction.correction import Correction, CorrectionState
from hocket.run.weights.updater import Updater


@dataclass(frozen=True, slots=True)
class ResumedCorrection:
    """What a stage's correction goes on with.

    Args:
        num_updates: that it has seen.
        names: in the checkpoint, of the weights that it has been correcting, by the
            model's.
    """

    num_updates: int
    names: Mapping[str, str]


def corrected(updater: Updater) -> CorrectionRecord | None:
    """What a checkpoint says of a stage's correction, beside its tensors."""
    if updater.correction is None:
        return None
    state = updater.correction.state_dict()
    return CorrectionRecord(_kind(updater.correction), state["num_updates"])


def kept_tensors(
    updaters: Iterable[Updater], held: Collection[str]
) -> dict[str, Tensor]:
    """The tensors that corrections keep, by name and age; nothing is copied.

    Args:
        updaters: of the stages.
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
    """What a stage's correction finds of its own in a checkpoint.

    Args:
        opened: the checkpoint.
        names: of the weights there, by the model's.
        updater: of the stage.
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
    return ResumedCorrection(
        max((seen[stored] for stored in own.values()), default=0), own
    )


def kept_places(
    opened: OpenedCheckpoint, resumed: ResumedCorrection
) -> dict[str, TensorLocation]:
    """Where the tensors are that a correction takes, by their names in the checkpoint.

    Raises:
        DamagedError: one is of another form than the weight itself.
    """
    weights, kept = (
        opened.locations(Section.WEIGHTS),
        opened.locations(Section.CORRECTION),
    )
    found: dict[str, TensorLocation] = {}
    for stored in resumed.names.values():
        found |= form_checked(kept, names_by_age(kept, stored), weights[stored])
    return found


def load_kept(
    updater: Updater, resumed: ResumedCorrection, tensors: Mapping[str, Tensor]
) -> None:
    """Let a stage's correction go on, or begin.

    Args:
        updater: of the stage.
        resumed: what it found.
        tensors: those that were read, by their names in the checkpoint.
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
