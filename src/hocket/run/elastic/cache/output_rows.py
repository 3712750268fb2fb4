"""The outputs of frozen layers as one row of bytes for each sample, and back.

outputs    x: (4, 197, 768) float32    y: (4, 12) int64
content    of each sample: 605184 bytes of x, 96 of y
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from hocket.errors import ModelError
from hocket.freeze.cache.shard import Content, Key
from hocket.model.trace.per_sample import (
    PerSample,
    Shared,
    num_rows,
    take_rows,
    unshared,
)
from hocket.model.trace.value import SentTensor, order_of, ordered
from hocket.run.data.batch import Microbatch
from hocket.run.stage.runner import StageRunner

_SAME: Final = 1e-3  # relative; of what differs by rounding alone


@dataclass(frozen=True, slots=True)
class FrozenPart:
    """Frozen layers, from the model's first on.

    Args:
        runner: runs them.
        digest: see `PartMaker.part`.
        kept_as: the type that floating-point numbers are kept in; None: as computed.
        before: the first of them, whose outputs were kept until now; None: are not.
        between: runs those behind the first, on what is kept.
        rows: the forms of their outputs, by that of the inputs.
    """

    runner: StageRunner
    digest: bytes
    kept_as: str | None
    before: FrozenPart | None = None
    between: StageRunner | None = None
    rows: dict[int, OutputRows] = field(default_factory=dict)

    def keys(self, data: int, samples: Sequence[int]) -> list[Key]:
        """Return the keys of samples in all forms; see `OutputRows.keys`."""
        return [key for rows in self.rows.values() for key in rows.keys(data, samples)]

    def add_form(
        self, form: int, microbatch: Microbatch, begun: Begun | None = None
    ) -> OutputRows:
        """Find the form of the outputs for microbatches like one.

        Args:
            form: the form of the inputs.
            microbatch: the microbatch.
            begun: what is kept of it behind the first layers, so that only those that
                follow run.

        Raises:
            ModelError: outputs cannot be kept by sample.
        """
        begun = Begun(self.runner) if begun is None else begun
        outputs = begun.run(microbatch)
        module = self.runner.module
        rows = OutputRows.of(
            outputs,
            module.outputs,
            microbatch.num_samples,
            self.kept_as,
            is_fixed=module.is_fixed,
        )
        if not self.rows:
            _refuse_dependent(begun, microbatch, outputs, rows)
        self.rows[form] = replace(rows, prefix=self.digest, form=form)
        return self.rows[form]


@dataclass(frozen=True, slots=True)
class Begun:
    """A microbatch of which the first layers' outputs are known.

    Args:
        runner: runs the layers behind them.
        received: those outputs; none where the runner runs all layers.
        rows: their form, in which no sample depends on another.
    """

    runner: StageRunner
    received: tuple[Tensor, ...] = ()
    rows: OutputRows | None = None

    def run(
        self, microbatch: Microbatch, samples: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the outputs of the layers behind them, without gradients.

        Args:
            microbatch: the microbatch, or one of some of its samples.
            samples: the places of those; None: of all.
        """
        received = self.received
        if samples is not None and self.rows is not None:
            received = self.rows.taken(received, samples)
        with torch.no_grad():
            return tuple(self.runner.evaluate(microbatch, received))


def _refuse_dependent(
    begun: Begun,
    microbatch: Microbatch,
    outputs: Sequence[Tensor],
    rows: OutputRows,
) -> None:
    """Refuse layers whose output of a sample depends on others in its microbatch.

    The first half of the samples is computed once more, beside copies of itself.

    Raises:
        ModelError: by how much they differ.
    """
    size = microbatch.num_samples
    half = size // 2
    if not half and None in rows.columns:
        raise ModelError(
            "the frozen layers have outputs without samples, and with one sample in a "
            "microbatch it cannot be seen whether they depend on it"
        )
    again = torch.arange(size) % max(half, 1)
    leaves = [
        leaf if num_rows(leaf) is None else take_rows(leaf, again)
        for leaf in microbatch.marked
    ]
    copies = replace(microbatch, leaves=tuple(unshared(leaves)))
    other = begun.run(copies, again)
    for x, y, column in zip(outputs, other, rows.columns, strict=True):
        count = len(x) if column is None else half * column.shape[0]
        a, b = x[:count].double(), y[:count].double()
        distance, norm = (a - b).norm().item(), a.norm().item()
        if not distance <= _SAME * norm:
            raise ModelError(
                f"the frozen layers' outputs of {half} samples differ by "
                f"{distance / norm if norm else distance:.3g} (relative) when the "
                "other samples of their microbatch are others, so they cannot be kept "
                "by sample"
            )


_BF16: Final = torch.bfloat16


@dataclass(frozen=True, slots=True)
class _Column:
    """One output with rows for each sample.

    Args:
        shape: the shape of one sample's rows, with their number in front.
        dtype: as it is computed.
        kept: as it is kept.
        order: see `order_of`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: torch.dtype
    order: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.kept.itemsize


@dataclass(frozen=True, slots=True)
class OutputRows:
    """The form of a stage's outputs, whatever the number of samples.

    Args:
        columns: the outputs' forms; None for one that is the same for all samples.
        fixed: what that output is.
        prefix: the stage's digest; see `Key`.
        form: the form of the inputs.
    """

    columns: tuple[_Column | None, ...]
    fixed: tuple[Tensor | None, ...]
    prefix: bytes = b""
    form: int = 0

    @classmethod
    def of(
        cls,
        outputs: Sequence[Tensor],
        values: Sequence[SentTensor],
        num_samples: int,
        kept_as: str | None,
        *,
        is_fixed: bool = False,
    ) -> Self:
        """Return the form of outputs.

        Args:
            outputs: a microbatch's.
            values: what is known of them.
            num_samples: the microbatch's.
            is_fixed: whether the model takes no other number of samples.
            kept_as: the type that floating-point numbers are kept in.

        Raises:
            ModelError: samples are not the first dimension of an output.
        """
        columns: list[_Column | None] = []
        for x, value in zip(outputs, values, strict=True):
            first, *others = value.per_sample or (0,)
            if is_fixed and x.dim():  # how dimensions grow is not known
                first = x.shape[0] == num_samples
            if not first and not any(others):
                columns.append(None)
                continue
            if any(others) or x.shape[0] % num_samples:
                raise ModelError(
                    f"{value.name} has the shape {tuple(x.shape)} for {num_samples} "
                    "samples, which are not its first dimension: it has no part that "
                    "is of one sample"
                )
            rows = x.shape[0] // num_samples, *x.shape[1:]
            rounds = kept_as is not None and x.is_floating_point()
            kept = _BF16 if rounds else x.dtype
            columns.append(_Column(rows, x.dtype, kept, order_of(x)))
        fixed = [
            x.clone() if column is None else None
            for x, column in zip(outputs, columns, strict=True)
        ]
        return cls(tuple(columns), tuple(fixed))

    @property
    def num_bytes(self) -> int:
        """The bytes of one sample."""
        return sum(column.num_bytes for column in self.columns if column is not None)

    def keys(self, data: int, samples: Sequence[int]) -> list[Key]:
        """Return the keys of samples.

        Args:
            data: a digest of the data set and its draw.
            samples: their rows in the data set.
        """
        return [Key(self.prefix, data, self.form, sample) for sample in samples]

    def kept(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return outputs as they are kept: rounded, if they are."""
        return tuple(
            x if column is None else x.to(column.kept)
            for x, column in zip(outputs, self.columns, strict=True)
        )

    def computed(self, kept: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return outputs in the types that they are computed in."""
        return tuple(
            x if column is None else _in_order(x.to(column.dtype), column.order)
            for x, column in zip(kept, self.columns, strict=True)
        )

    def taken(self, outputs: Sequence[Tensor], samples: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of some of a microbatch's samples.

        Args:
            outputs: the microbatch's.
            samples: their places in it.
        """
        return tuple(
            x
            if column is None
            else x.unflatten(0, (-1, column.shape[0]))[samples.to(x.device)].flatten(
                0, 1
            )
            for x, column in zip(outputs, self.columns, strict=True)
        )

    def pack(self, kept: Sequence[Tensor], num_samples: int) -> list[Content]:
        """Return the content of each sample.

        Args:
            kept: see `kept`; on the host.
            num_samples: samples in them.
        """
        parts = [
            x.reshape(num_samples, -1).contiguous().view(torch.uint8)
            for x, column in zip(kept, self.columns, strict=True)
            if column is not None and column.num_bytes
        ]
        if not parts:  # all outputs are the same for all samples
            return [np.empty(0, np.uint8) for _ in range(num_samples)]
        joined = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        return [row.copy() for row in joined.numpy()]

    def unpack(
        self, contents: Sequence[Content], device: torch.device
    ) -> tuple[Tensor, ...]:
        """Return the outputs of a microbatch.

        Args:
            contents: those of its samples, in order.
            device: where they go.
        """
        count = len(contents)
        pins = device.type == "cuda"
        host = torch.empty((count, self.num_bytes), dtype=torch.uint8, pin_memory=pins)
        np.stack(contents, out=host.numpy())
        sizes = [column.num_bytes for column in self.columns if column is not None]
        parts = iter(host.to(device, non_blocking=True).split(sizes, dim=1))
        kept: list[Tensor] = []
        for column, fixed in zip(self.columns, self.fixed, strict=True):
            if column is None:
                assert fixed is not None
                kept.append(fixed.clone())
                continue
            # A copy: a slice of one row counts as contiguous, at any offset.
            part = next(parts).clone(memory_format=torch.contiguous_format)
            shape = (count * column.shape[0], *column.shape[1:])
            kept.append(part.reshape(-1).view(column.kept).reshape(shape))
        return self.computed(kept)


def _in_order(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    if order_of(tensor) == order:
        return tensor
    memory = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return ordered(memory, tensor.shape, order).copy_(tensor)


def input_form(microbatch: Microbatch) -> int | None:
    """Return a digest of the shapes and types of a microbatch's samples.

    Returns:
        The digest; None if each sample may have a form of its own.
    """
    if any(isinstance(leaf, PerSample | np.ndarray) for leaf in microbatch.leaves):
        return None
    return crc32(repr([_form_of(leaf) for leaf in microbatch.marked]).encode())


def _form_of(leaf: Any) -> str:
    if isinstance(leaf, Shared) and isinstance(leaf.value, Tensor):
        values = leaf.value.detach().cpu().resolve_conj().contiguous()
        return (
            f"{values.shape} {crc32(values.reshape(-1).view(torch.uint8).numpy().data)}"
        )
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    if leaf.dim():
        return f"{tuple(leaf.shape[1:])} {leaf.dtype}"
    return f"{leaf.item()} {leaf.dtype}"
