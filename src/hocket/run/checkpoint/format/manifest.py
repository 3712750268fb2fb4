"""The records of a checkpoint: a manifest, and a part for each worker.

    manifest.sha256 ──hash──▶ manifest.json ──hash──▶ part-0.json ──hash──▶ each tensor
                                            ──hash──▶ part-1.json ──hash──▶ each tensor

Every byte of every file is under a hash: in a tensor file, its header and each of its
tensors have one. A worker that needs some tensors reads and hashes only those.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Annotated, Any, Final, Literal, TypeVar

from hocket.errors import DamagedError

VERSION: Final = 2
MANIFEST: Final = "manifest.json"
MANIFEST_HASH: Final = "manifest.sha256"

# Bytes of one entry, by the names that safetensors gives to types.
ITEM_BYTES: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
    "C128": 16,
}


class Constraint:
    """A constraint that pydantic checks when it parses a record.

    `pydantic.Field` does the same, but a module that uses it imports pydantic, which
    training does not need.

    Args:
        limits: keys of pydantic's core schema, as `pattern` and `ge`.
    """

    def __init__(self, **limits: str | int) -> None:
        self._limits: Final = limits

    def __get_pydantic_core_schema__(
        self, source: Any, handler: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the schema of the annotated type with these limits."""
        return handler(source) | self._limits


Sha256 = Annotated[str, Constraint(pattern="^[0-9a-f]{64}$")]
TypeName = Annotated[str, Constraint(pattern=f"^({'|'.join(ITEM_BYTES)})$")]
Count = Annotated[int, Constraint(ge=0)]


class Section(Enum):
    """The content of a tensor file. The value begins its name."""

    WEIGHTS = "weights"  # parameters and buffers
    AVERAGED = "averaged"  # averages of parameters over steps
    OPTIMIZER = "optimizer"  # the optimizer's state of each parameter
    OLD = "old"  # parameters before the last updates, where they are still read
    CORRECTION = "correction"  # of runs of earlier versions; nothing reads it
    REPLICA = "replica"  # buffers that other replicas than the first hold (BatchNorm)
    WAVE = "wave"  # of a run in two waves: the second copy, and what each replica has
    WATCHED = "watched"  # what a freezing policy measures since its last decision


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor in a file.

    Args:
        dtype: safetensors' name of its type.
        shape: the shape of the whole tensor.
        sha256: the hash of its bytes.
    """

    dtype: TypeName
    shape: tuple[Count, ...]
    sha256: Sha256

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return ITEM_BYTES[self.dtype] * prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorFile:
    """One safetensors file: a header, and the tensors after it without gaps.

    Args:
        section: the kind of its tensors.
        name: the file's name.
        header_bytes: the bytes before the first tensor.
        header_sha256: the hash of the header.
        tensors: the tensors by name, in the order of their bytes.
    """

    section: Section
    name: Annotated[str, Constraint(pattern=r"^[a-z]+-\d{1,9}\.safetensors$")]
    header_bytes: Count
    header_sha256: Sha256
    tensors: dict[str, TensorRecord]

    @property
    def num_bytes(self) -> int:
        """The size of the whole file."""
        return self.header_bytes + sum(x.num_bytes for x in self.tensors.values())

    def locations(self) -> Iterator[tuple[str, TensorRecord, int]]:
        """Yield each tensor with its first byte."""
        begin = self.header_bytes
        for name, record in self.tensors.items():
            yield name, record, begin
            begin += record.num_bytes


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """A parameter group of an optimizer.

    Args:
        options: learning rate and the like, as JSON (`values.encode`).
        parameters: the parameters' names.
    """

    options: dict[str, Any]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """The optimizer and schedule of one stage.

    Args:
        optimizer: the class of its optimizer.
        groups: the optimizer's parameter groups, in order.
        states: the optimizer's state of each parameter, as JSON that names tensors.
        scheduler: the class of its learning-rate schedule, if it has one.
        scheduler_state: the schedule's state, as JSON.
    """

    optimizer: str
    groups: tuple[ParameterGroup, ...]
    states: dict[str, Any]
    scheduler: str | None = None
    scheduler_state: Any = None


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """All that one worker wrote.

    Args:
        rank: the worker's rank.
        replica: the worker's replica.
        files: its tensor files.
        updates: the optimizer of each of its stages that has one.
        random: the states of its random number generators.
        extra: the extra states of modules (`values.pack`); those of later parts count.
    """

    rank: Count
    replica: Count
    files: tuple[TensorFile, ...]
    updates: tuple[UpdateRecord, ...] = ()
    random: dict[str, Any] = dataclasses.field(default_factory=dict)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The part's file name."""
        return f"part-{self.rank}.json"


@dataclass(frozen=True, slots=True)
class PartRecord:
    """A part's file: its name, and the hash of its bytes."""

    name: Annotated[str, Constraint(pattern=r"^part-\d{1,9}\.json$")]
    sha256: Sha256


@dataclass(frozen=True, slots=True)
class FreezingRecord:
    """What was frozen when a run was saved, and the state of its freezing policy.

    Args:
        layers: the frozen layers' modules, in the model's order.
        parameters: the frozen parameters, also those before the first layer.
        shape: stages and replicas.
        policy: the class of the policy.
        number: how often the policy was asked.
        state: the policy's state, as JSON (`values.encode`).
        last_step: the step before which it was last asked.
        epoch_ended: whether an epoch has ended since then.
    """

    layers: tuple[str, ...]
    parameters: tuple[str, ...]
    shape: tuple[Count, Count]
    policy: str
    number: Count
    state: Any
    last_step: Count
    epoch_ended: bool


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The facts of the run that was saved, beside its tensors.

    Args:
        step: the number of steps trained; the next one has this number.
        seed: the seed of random numbers in the forward.
        num_replicas: the replicas of the pipeline that wrote it.
        scaler: the state of the gradient scaler.
        has_averages: whether averages of the weights are kept.
        ties: the other names of a weight, by its first.
        config: the config of a model of the transformers library.
        data: the user's data: the position in the data set.
        freezing: the frozen layers, and the policy's state, where layers may freeze.
        num_filled: the samples that forwards in the pipeline's bubbles have done.
        waves: the states of a run in two waves (`sharing/waves/saved.py`).
    """

    step: Count
    seed: int = 0
    num_replicas: int = 1
    scaler: Any = None
    has_averages: bool = False
    ties: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] | None = None
    data: Any = None
    freezing: FreezingRecord | None = None
    num_filled: Count = 0
    waves: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record of a whole checkpoint.

    Args:
        number: its number in this folder, from 0, in the order of saving.
        saved_at: date and time, for people.
        hocket: the version that wrote it.
        run: the run's record.
        parts: the part of each worker, by rank.
        format: identifies a checkpoint's manifest among other JSON.
        version: the version of this form; the first one had no old weights.
    """

    number: Count
    saved_at: str
    hocket: str
    run: RunRecord
    parts: tuple[PartRecord, ...]
    format: Literal["hocket checkpoint"] = "hocket checkpoint"
    version: Literal[1, 2] = VERSION


T = TypeVar("T", Manifest, WorkerPart)


_NAMES: Final = {Manifest: "manifest", WorkerPart: "part"}


def to_json(value: Manifest | WorkerPart) -> bytes:
    """Return a record as it is written to the file."""
    return json.dumps(value, default=_plain, indent=1).encode()


def from_json(kind: type[T], content: bytes, path: object) -> T:
    """Parse and validate a record.

    Raises:
        DamagedError: it is not a valid record; names the file, and what is wrong with
            it.
    """
    import pydantic  # takes a while to import, and is needed only here

    try:
        return pydantic.TypeAdapter(kind).validate_json(content, strict=True)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole file"
        raise DamagedError(
            f"{path} is no {_NAMES[kind]} of a checkpoint: {where}: {first['msg']}"
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return {x.name: getattr(value, x.name) for x in dataclasses.fields(value)}
