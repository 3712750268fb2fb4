"""Exports the weights of a checkpoint for other programs.

    safetensors   one file, or several with an index.json where it would be too large
    hf            a folder that `from_pretrained` of transformers reads
    pt            a torch state dict, with every name of a tied weight
    dcp           torch.distributed.checkpoint

Every tensor is compared with its hash on the way. What is written is there as a whole
or not at all, and nothing is written over.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Final, assert_never

import torch

from hocket.errors import CheckpointError
from hocket.run.checkpoint.format.durable import (
    renamed_when_complete,
    sync_folder,
    write_file,
)
from hocket.run.checkpoint.format.manifest import MANIFEST, Section
from hocket.run.checkpoint.format.newest import find
from hocket.run.checkpoint.format.opened import (
    OpenedCheckpoint,
    TensorLocation,
    check_pointer,
    open_checkpoint,
    read_tensor,
)
from hocket.run.checkpoint.format.tensor_file import TensorSource, write_tensors

MAX_FILE_BYTES: Final = 5 * 10**9  # as the Hugging Face hub wants them


class WeightFormat(Enum):
    """A file format that other programs read."""

    SAFETENSORS = "safetensors"
    HUGGING_FACE = "hf"
    TORCH = "pt"
    DISTRIBUTED = "dcp"


def export(
    checkpoint: str | Path,
    target: str | Path,
    format: WeightFormat = WeightFormat.SAFETENSORS,  # noqa: A002  (it is the word for it)
    *,
    step: int | str = "latest",
    averaged: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write a checkpoint's weights in a format that other programs read.

    Args:
        checkpoint: a run's folder of checkpoints, or one of them.
        target: a file (safetensors, pt) or a folder (hf, dcp), not there yet.
        format: the format to write.
        step: the step of the checkpoint, if the folder has several.
        averaged: whether to export the averaged weights in place of the trained ones.
        max_file_bytes: the size above which a safetensors file is split into several.

    Returns:
        The files, or the folder.

    Raises:
        CheckpointError: there is no such checkpoint, it does not hold what was asked
            for, or the target exists or cannot be written.
        DamagedError: a file is not what was saved.
    """
    target = Path(target)
    opened = open_one(checkpoint, step)
    locations = _places(opened, averaged=averaged)
    if target.exists():
        raise CheckpointError(f"{target} exists already: give another name")
    try:
        match format:
            case WeightFormat.SAFETENSORS:
                return _safetensors(locations, opened, target, max_file_bytes)
            case WeightFormat.HUGGING_FACE:
                return _hugging_face(locations, opened, target, max_file_bytes)
            case WeightFormat.TORCH:
                return _torch(locations, opened, target)
            case WeightFormat.DISTRIBUTED:
                return _distributed(locations, opened, target)
            case _:
                assert_never(format)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror}") from error


def read_weights(
    checkpoint: str | Path, *, step: int | str = "latest", averaged: bool = False
) -> dict[str, Any]:
    """Return a checkpoint's state dict: weights, buffers, all tied names, extra state.

    Raises:
        CheckpointError: see `export`.
        DamagedError: see `export`.
    """
    opened = open_one(checkpoint, step)
    return _state_dict(_places(opened, averaged=averaged), opened)


def open_one(checkpoint: str | Path, step: int | str = "latest") -> OpenedCheckpoint:
    """Open the checkpoint at a path, or the one of a step in the folder there.

    Raises:
        CheckpointError: there is none.
        DamagedError: a file is not what was saved.
    """
    path = Path(checkpoint)
    if not (path / MANIFEST).exists():
        path = find(path, step)
    check_pointer(path)
    return open_checkpoint(path)


def _places(opened: OpenedCheckpoint, *, averaged: bool) -> dict[str, TensorLocation]:
    locations = opened.locations(Section.WEIGHTS)
    if averaged:
        if not opened.manifest.run.has_averages:
            raise CheckpointError(f"{opened.path} holds no averaged weights")
        locations |= opened.locations(Section.AVERAGED)
    return locations


def _state_dict(
    locations: Mapping[str, TensorLocation], opened: OpenedCheckpoint
) -> dict[str, Any]:
    state: dict[str, Any] = {
        name: read_tensor(place, name) for name, place in locations.items()
    }
    for first, others in opened.manifest.run.ties.items():
        if first in state:
            state |= dict.fromkeys(others, state[first])
    return state | opened.extra


def _safetensors(
    locations: Mapping[str, TensorLocation],
    opened: OpenedCheckpoint,
    target: Path,
    max_file_bytes: int,
) -> list[Path]:
    """Write `model.safetensors`, or numbered files and an index."""
    wide = [name for name, x in locations.items() if x.record.dtype == "C128"]
    if others := [*opened.extra, *wide]:
        raise CheckpointError(
            f"{opened.path} holds {', '.join(others)}, and safetensors hold neither "
            "extra state nor complex128: export as pt or dcp"
        )
    groups = list(_split(locations, max_file_bytes))
    if len(groups) == 1:
        names = [target.name]
    else:
        stem, count = target.name.removesuffix(".safetensors"), len(groups)
        numbers = range(1, count + 1)
        names = [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in numbers]
    ties = opened.manifest.run.ties.items()
    metadata = {other: first for first, others in ties for other in others}
    files = []
    for name, group in zip(names, groups, strict=True):
        sources = {key: _source(key, place) for key, place in group.items()}
        own = {other: first for other, first in metadata.items() if first in group}
        files.append(target.with_name(name))
        with renamed_when_complete(files[-1]) as temporary:
            write_tensors(temporary, Section.WEIGHTS, sources, own)
    if len(groups) > 1:
        index = target.with_name(f"{stem}.safetensors.index.json")
        write_file(index, _index(names, groups))
        files.append(index)
    sync_folder(target.absolute().parent)
    return files


def _index(names: list[str], groups: list[dict[str, TensorLocation]]) -> bytes:
    sizes = [place.record.num_bytes for group in groups for place in group.values()]
    weight_map = {
        key: name for name, group in zip(names, groups, strict=True) for key in group
    }
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    return json.dumps(index, indent=2).encode()


def _hugging_face(
    locations: Mapping[str, TensorLocation],
    opened: OpenedCheckpoint,
    target: Path,
    max_file_bytes: int,
) -> list[Path]:
    config = opened.manifest.run.config
    if config is None:
        raise CheckpointError(
            f"{opened.path} is of a model without a transformers config: only models "
            "of that library become such a folder; take safetensors"
        )

    with _new_folder(target) as folder:
        _safetensors(locations, opened, folder / "model.safetensors", max_file_bytes)
        write_file(folder / "config.json", json.dumps(config, indent=2).encode())
    return [target]


def _torch(
    locations: Mapping[str, TensorLocation], opened: OpenedCheckpoint, target: Path
) -> list[Path]:
    try:
        with renamed_when_complete(target) as temporary:
            torch.save(_state_dict(locations, opened), temporary)
    except RuntimeError as error:  # torch's own for a full disk
        raise CheckpointError(f"cannot write {target}: {error}") from error
    return [target]


def _distributed(
    locations: Mapping[str, TensorLocation], opened: OpenedCheckpoint, target: Path
) -> list[Path]:
    import torch.distributed.checkpoint as dcp

    state = _state_dict(locations, opened)
    with _new_folder(target) as folder, warnings.catch_warnings():
        # It warns that one process is all there is.
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return [target]


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Make a folder under another name; it is renamed when it is complete."""
    with renamed_when_complete(target) as temporary:
        temporary.mkdir(parents=True)
        yield temporary
        sync_folder(temporary)


def _split(
    locations: Mapping[str, TensorLocation], max_file_bytes: int
) -> Iterator[dict[str, TensorLocation]]:
    """Yield groups of at most so many bytes, or of one larger tensor."""
    group: dict[str, TensorLocation] = {}
    size = 0
    for name, place in locations.items():
        if group and size + place.record.num_bytes > max_file_bytes:
            yield group
            group, size = {}, 0
        group[name] = place
        size += place.record.num_bytes
    yield group


def _source(name: str, place: TensorLocation) -> TensorSource:
    record = place.record
    return TensorSource(record.dtype, record.shape, partial(read_tensor, place, name))
