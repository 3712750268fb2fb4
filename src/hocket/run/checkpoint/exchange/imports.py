"""Makes a checkpoint from weights that another program wrote.

It holds weights alone: a pipeline that loads it begins with step 0 and a new optimizer.
Whatever could run code when it is read is refused, never read anyway.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from hocket.errors import CheckpointError, ModelError
from hocket.model.stages.saved_modules import EXTRA_STATE
from hocket.run.checkpoint.collect import WorkerShare
from hocket.run.checkpoint.commit import SaveJob, clean, commit
from hocket.run.checkpoint.exchange.dcp import (
    METADATA,
    flattened,
    load_values,
    read_dcp,
)
from hocket.run.checkpoint.format.durable import FolderLock
from hocket.run.checkpoint.format.manifest import RunRecord, Section
from hocket.run.checkpoint.format.tensor_file import TensorSource
from hocket.run.cluster.store.store_exchange import StoreExchange
from hocket.run.cluster.store.values import pack

_TIMEOUT_S: Final = 60.0  # no other worker is waited for
_NUM_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class _Entry:
    """One value of another program's file.

    Args:
        file: the file that holds it.
        name: its name there.
        value: a tensor, or anything else.
    """

    file: Path
    name: str
    value: Any


def import_weights(source: str | Path, folder: str | Path, *, prefix: str = "") -> Path:
    """Make a checkpoint of step 0 from weights in another form.

    Args:
        source: a `.safetensors` file; a `.pt`, `.pth` or `.bin` file of torch; a
            folder of torch.distributed.checkpoint; or a folder with safetensors files,
            such as of the Hugging Face hub.
        folder: the folder of checkpoints to which the new one is added.
        prefix: import only names that begin with it, without it: "model." if the
            weights are beside other things.

    Returns:
        The path of the new checkpoint.

    Raises:
        CheckpointError: the source cannot be read, or holds more than tensors; or the
            folder cannot be written.
    """
    source, folder = Path(source), Path(folder)
    tensors, extra = _collected(source, _read(source), prefix)
    tensors, ties = _once(tensors)
    run = RunRecord(step=0, weights_only=True, ties=ties, config=_config(source))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        clean(folder)
        share = WorkerShare(0, 0, {Section.WEIGHTS: tensors}, (), {}, extra)
        alone = StoreExchange(dist.HashStore(), 0, 1, _TIMEOUT_S)
        return commit(SaveJob(folder, run, None), lambda: share, alone)
    finally:
        lock.release()


def _read(source: Path) -> Iterator[_Entry]:
    """Yield everything that a source holds.

    Raises:
        CheckpointError: it cannot be read; names the file.
    """
    if not source.exists():
        raise CheckpointError(f"{source} does not exist")
    if source.is_dir():
        if (source / METADATA).exists():
            for name, value in read_dcp(source).items():
                yield _Entry(source / METADATA, name, value)
            return
        yield from _read_safetensors(source, sorted(source.glob("*.safetensors")))
    elif source.suffix == ".safetensors":
        yield from _read_safetensors(source, [source])
    elif source.suffix in {".pt", ".pth", ".bin"}:
        yield from _read_torch(source)
    else:
        raise CheckpointError(
            f"{source}: known are .safetensors, .pt, .pth and .bin files, and folders "
            "of safetensors or of torch.distributed.checkpoint"
        )


def _read_safetensors(source: Path, files: list[Path]) -> Iterator[_Entry]:
    if not files:
        raise CheckpointError(f"{source} has neither {METADATA} nor safetensors files")
    for path in files:
        try:
            names = _header_names(path)
            tensors = load_file(path)
        except Exception as error:  # a damaged file may fail in any way
            raise CheckpointError(
                f"{path} cannot be read: {type(error).__name__}: {error}"
            ) from error
        for name in names:
            yield _Entry(path, name, tensors[name])


def _read_torch(source: Path) -> Iterator[_Entry]:
    try:
        for name, value in flattened(load_values(source)):
            yield _Entry(source, name, value)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error


def _header_names(path: Path) -> list[str]:
    """Return the names in a safetensors file; one that is there twice comes twice."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError(f"its header should have {size:,} bytes: it is cut off")
        pairs = json.loads(file.read(size), object_pairs_hook=list)
    return [name for name, _ in pairs if name != "__metadata__"]


def _collected(
    source: Path, entries: Iterable[_Entry], prefix: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors, and packed extra states, whose names begin with the prefix.

    Raises:
        CheckpointError: there are no tensors, or values beside them; a name is there
            twice; or a tensor is of a kind that a checkpoint cannot hold.
    """
    taken: dict[str, _Entry] = {}
    seen: list[str] = []
    for entry in entries:
        seen.append(entry.name)
        if not entry.name.startswith(prefix):
            continue
        name = entry.name.removeprefix(prefix)
        if name in taken:
            raise CheckpointError(
                f"{entry.file}: {entry.name} is there twice, the first time in "
                f"{taken[name].file}: import one file, or rename one of the two"
            )
        taken[name] = entry
    extra = {name: taken.pop(name) for name in [*taken] if name.endswith(EXTRA_STATE)}
    others = [x.name for x in taken.values() if not isinstance(x.value, Tensor)]
    if not taken or others:
        names = ", ".join((others or seen)[:_NUM_SHOWN])
        what = f"no tensors under {prefix!r}" if not taken else "more than tensors"
        raise CheckpointError(
            f"{source} holds {what} ({names}, ...): name the prefix under which the "
            "model's weights are, such as 'model.'"
        )
    try:
        packed = {name: pack(entry.value, entry.name) for name, entry in extra.items()}
    except ModelError as error:
        raise CheckpointError(f"{source}: {error}") from None
    return {name: _dense(name, entry) for name, entry in taken.items()}, packed


def _dense(name: str, entry: _Entry) -> Tensor:
    """Return a tensor that safetensors can hold.

    Raises:
        CheckpointError: it is of another kind; names file and entry.
    """
    value: Tensor = entry.value
    try:
        TensorSource.of(name, value)
    except CheckpointError as error:
        raise CheckpointError(f"{entry.file}: {error}") from error
    return value.detach().resolve_conj().resolve_neg()


def _once(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, tuple[str, ...]]]:
    """Return each tensor under its first name only, and the other names of each."""
    first_of: dict[tuple[Any, ...], str] = {}
    ties: dict[str, tuple[str, ...]] = {}
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = first_of.setdefault(key, name) if tensor.numel() else name
        if first == name:
            kept[name] = tensor
        else:
            ties[first] = (*ties.get(first, ()), name)
    return kept, ties


def _config(source: Path) -> dict[str, Any] | None:
    """Return the config.json beside a model of the transformers library."""
    path = source / "config.json"
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return found if isinstance(found, dict) else None
