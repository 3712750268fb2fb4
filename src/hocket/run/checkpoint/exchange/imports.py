"""Makes a checkpoint from weights that another program wrote.

It holds weights alone: a pipeline that loads it begins with step 0 and a new optimizer.
Whatever could run code when it is read is refused, never read anyway.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hocket.errors import CheckpointError
from hocket.run.checkpoint.collect import WorkerShare
from hocket.run.checkpoint.commit import SaveJob, clean, commit
from hocket.run.checkpoint.exchange.dcp import METADATA, read_dcp
from hocket.run.checkpoint.format.lock import FolderLock
from hocket.run.checkpoint.format.manifest import RunRecord, Section
from hocket.run.cluster.store.store_exchange import StoreExchange

_TIMEOUT_S: Final = 60.0  # no other worker is waited for
_NUM_SHOWN: Final = 5


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
    tensors = _with_prefix(source, _read(source), prefix)
    tensors, ties = _once(tensors)
    run = RunRecord(step=0, weights_only=True, ties=ties, config=_config(source))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        clean(folder)
        share = WorkerShare(0, 0, {Section.WEIGHTS: tensors}, (), {})
        alone = StoreExchange(dist.HashStore(), 0, 1, _TIMEOUT_S)
        return commit(SaveJob(folder, run, None), lambda: share, alone)
    finally:
        lock.release()


def _read(source: Path) -> dict[str, Any]:
    if not source.exists():
        raise CheckpointError(f"{source} does not exist")
    if source.is_dir():
        if (source / METADATA).exists():
            return dict(read_dcp(source))
        return dict(_read_safetensors(source, sorted(source.glob("*.safetensors"))))
    if source.suffix == ".safetensors":
        return dict(_read_safetensors(source, [source]))
    if source.suffix in {".pt", ".pth", ".bin"}:
        return dict(_flat(_read_torch(source), ""))
    raise CheckpointError(
        f"{source}: known are .safetensors, .pt, .pth and .bin files, and folders of "
        "safetensors or of torch.distributed.checkpoint"
    )


def _read_safetensors(source: Path, files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    if not files:
        raise CheckpointError(f"{source} has neither {METADATA} nor safetensors files")
    for path in files:
        try:
            yield from load_file(path).items()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def _read_torch(source: Path) -> Any:
    try:
        with warnings.catch_warnings():  # of what it then refuses
            warnings.simplefilter("ignore", UserWarning)
            return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        first = str(error).strip().split("\n", 1)[0]
        raise CheckpointError(
            f"{source} holds more than tensors and plain values, so reading it could "
            f"run code; it is not read ({first}). Where you trust it, load it yourself "
            "and save the state dict alone"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{source} cannot be read: {error}") from error


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Flatten nested dicts: `{"model": {"a": x}}` becomes `model.a`."""
    if isinstance(value, Mapping):
        for key, x in value.items():
            yield from _flat(x, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _with_prefix(
    source: Path, values: Mapping[str, Any], prefix: str
) -> dict[str, Tensor]:
    taken = {
        name.removeprefix(prefix): x
        for name, x in values.items()
        if name.startswith(prefix)
    }
    others = [name for name, x in taken.items() if not isinstance(x, Tensor)]
    if not taken or others:
        names = ", ".join((others or list(values))[:_NUM_SHOWN])
        what = f"no tensors under {prefix!r}" if not taken else "more than tensors"
        raise CheckpointError(
            f"{source} holds {what} ({names}, ...): name the prefix under which the "
            "model's weights are, such as 'model.'"
        )
    return taken


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
