"""Checks that a checkpoint fits this model and this run's settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hocket.errors import CheckpointError
from hocket.model.stages.outline import Outline
from hocket.model.trace.state import gradient_type
from hocket.run.checkpoint.format.manifest import RunRecord, Section
from hocket.run.checkpoint.format.opened import OpenedCheckpoint, name_of

_NUM_SHOWN: Final = 3


def match_names(opened: OpenedCheckpoint, outline: Outline) -> dict[str, str]:
    """Return the checkpoint's name of each of the model's tensors, by first name.

    A tied weight may have any of its names there.

    Args:
        opened: the checkpoint.
        outline: the uncut model's.

    Raises:
        CheckpointError: the checkpoint is of another model; lists the differences.
    """
    locations, state = opened.locations(Section.WEIGHTS), outline.state
    extra_there, extra_here = opened.extra.keys(), outline.modules.extra_names
    expected = {
        first: state.tensors[first]
        for first, names in state.names.items()
        if not state.persistent.isdisjoint(names)
    }
    found: dict[str, str] = {}
    unknown = sorted(extra_there - extra_here)
    twice = []
    for name, place in locations.items():
        first = state.first_name.get(name, name)
        if first not in expected:
            unknown.append(name)
        elif first in found:
            if locations[found[first]].record.sha256 != place.record.sha256:
                twice.append(f"{name} and {found[first]}")
        else:
            found[first] = name
    forms = []
    for first, name in found.items():
        record, tensor = locations[name].record, expected[first]
        there = _form(record.dtype, record.shape)
        # Masters have the type of gradients: what is saved of weights that have some.
        types = tensor.dtype, gradient_type(tensor)
        here = [_form(name_of(x, first), tensor.shape) for x in types]
        if there not in here:
            forms.append(f"{first}: {there} there, {here[0]} here")
    missing = [x for x in expected if x not in found]
    missing += sorted(extra_here - extra_there)
    faults = [
        _several("name", "only in the checkpoint", unknown),
        _several("name", "only in the model", missing),
        _several("tensor", "of another shape or type", forms),
        _several("tied weight", "saved with two values", twice),
    ]
    if any(faults):
        raise CheckpointError(
            f"{opened.path} is of another model: {'; '.join(filter(None, faults))}. "
            "Nothing was loaded"
        )
    return found


def check_setup(path: Path, there: RunRecord, here: RunRecord) -> None:
    """Check that this run keeps the same kinds of state as the one that was saved.

    Args:
        path: the checkpoint.
        there: the saved run's record.
        here: this run's record.

    Raises:
        CheckpointError: the runs differ; names what differs.
    """
    if there.waves is not None:
        raise CheckpointError(
            f"{path} is of a run in two waves: load it with hocket.Waves; to take the "
            "weights alone, export them and load them into the model before the "
            "pipeline is made. Nothing was loaded"
        )
    kinds = [
        (
            "gradient scaler (precision)",
            there.scaler is not None,
            here.scaler is not None,
        ),
        ("averaged weights (ema_decay)", there.has_averages, here.has_averages),
    ]
    differing = [
        f"{what} {'here' if own else 'there'}, but none {'there' if own else 'here'}"
        for what, saved, own in kinds
        if saved != own
    ]
    if differing:
        raise CheckpointError(
            f"{path} is of a run that was set up in another way: "
            f"{'; '.join(differing)}. Make the pipeline as then; to take the weights "
            "alone, export them and load them into the model before the pipeline is "
            "made. Nothing was loaded"
        )


def _form(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _several(what: str, where: str, items: Sequence[str]) -> str:
    """Format `2 names only in the model (a, b)`, or nothing."""
    if not items:
        return ""
    more = ", ..." if len(items) > _NUM_SHOWN else ""
    plural = "s" if len(items) > 1 else ""
    shown = ", ".join(items[:_NUM_SHOWN])
    return f"{len(items):,} {what}{plural} {where} ({shown}{more})"
