"""The schema of a message between two workers, and its tag.

A message is a flat run of bytes; the schema says which tensors lie in it, and where:

    float32[4, 8], int64[4]     bytes 0 ........ 128 ... 160 .. 192
                                      x: 4 × 8 × 4   y: 4 × 8   (each begins at a
                                                                 multiple of 64)

A tensor that is not contiguous keeps the order of its dimensions in memory (channels
last is `float32[8, 3, 6, 6](0, 2, 3, 1)`): who receives it may view it as its maker.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from hocket.errors import SchemaError
from hocket.model.trace.value import order_of, ordered

ALIGNMENT_BYTES: Final = 64  # a cache line, and what torch's own allocator gives
ANY: Final = -1  # in a pattern: a dimension that depends on the batch

_DIGEST_BITS: Final = 32
_DIGEST_MASK: Final = (1 << _DIGEST_BITS) - 1
_STEP_BITS: Final = 40
_MICROBATCH_BITS: Final = 24
_SPEC: Final = re.compile(r"(\w+)\[([^\]]*)\](?:\(([^)]*)\))?")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape and type of one tensor, written like `float32[4, 8]`.

    Args:
        shape: the dimensions; in a pattern, `ANY` marks unknown ones and is written
            `*`.
        dtype: torch's name of the type, such as `float32`.
        order: the dimensions from the largest stride to the smallest; empty if the
            tensor is contiguous, or in a pattern.
    """

    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...] = ()

    def __str__(self) -> str:
        dims = ", ".join("*" if dim == ANY else str(dim) for dim in self.shape)
        order = f"({', '.join(map(str, self.order))})" if self.order else ""
        return f"{self.dtype}[{dims}]{order}"

    def fits(self, pattern: TensorSpec) -> bool:
        """Return whether this matches a pattern, in which the order is not known."""
        return (
            self.dtype == pattern.dtype
            and len(self.shape) == len(pattern.shape)
            and all(
                p in (ANY, n) for n, p in zip(self.shape, pattern.shape, strict=True)
            )
        )


@dataclass(frozen=True, slots=True)
class Schema:
    """The tensors of one message, in order.

    Attributes:
        num_bytes: the length of the message, each tensor's end rounded up to 64.
        digest: 32 bits of a hash of `str(schema)`, the same in every process.

    Raises:
        SchemaError: torch has no type of that name.
    """

    tensors: tuple[TensorSpec, ...]
    num_bytes: int = field(init=False, repr=False, compare=False)
    digest: int = field(init=False, repr=False, compare=False)
    _dtypes: tuple[torch.dtype, ...] = field(init=False, repr=False, compare=False)
    _offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        dtypes = tuple(_dtype(spec) for spec in self.tensors)
        offsets, end = [], 0
        for spec, dtype in zip(self.tensors, dtypes, strict=True):
            offsets.append(end)
            num_bytes = math.prod(spec.shape) * dtype.itemsize
            end += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        text_hash = hashlib.blake2s(str(self).encode(), digest_size=4)
        object.__setattr__(self, "num_bytes", end)
        object.__setattr__(self, "digest", int.from_bytes(text_hash.digest()))
        object.__setattr__(self, "_dtypes", dtypes)
        object.__setattr__(self, "_offsets", tuple(offsets))

    def __hash__(self) -> int:
        """Hash by the digest: schemas are looked up once per message."""
        return self.digest

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors)) or "no tensors"

    @classmethod
    def parse(cls, text: str) -> Schema:
        """Parse what `str` returns.

        Raises:
            SchemaError: the text is no schema.
        """
        if text == "no tensors":
            return cls(())
        specs = tuple(_parse_spec(*match.groups("")) for match in _SPEC.finditer(text))
        if ", ".join(map(str, specs)) != text or not specs:
            raise SchemaError(f"{text!r} is no schema; one looks like float32[4, 8]")
        return cls(specs)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether tensors have the shapes and types that the schema names."""
        if len(tensors) != len(self.tensors):
            return False
        for tensor, spec, dtype in zip(
            tensors, self.tensors, self._dtypes, strict=True
        ):
            if tensor.dtype is not dtype or tensor.shape != spec.shape:
                return False
        return True

    def fits(self, pattern: Schema) -> bool:
        """Return whether this matches a pattern with `ANY` dimensions."""
        return len(self.tensors) == len(pattern.tensors) and all(
            spec.fits(like)
            for spec, like in zip(self.tensors, pattern.tensors, strict=True)
        )

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of a message, as views of its bytes.

        Each view has its own version counter (`.data` does that): changing one input in
        place must not invalidate the others for autograd.

        Args:
            flat: the message's bytes: shape `(at least num_bytes,)`, uint8.
        """
        return tuple(
            ordered(
                flat[at : at + math.prod(spec.shape) * dtype.itemsize].view(dtype),
                spec.shape,
                spec.order,
            ).data
            for spec, dtype, at in zip(
                self.tensors, self._dtypes, self._offsets, strict=True
            )
        )


def schema_of(tensors: Sequence[Tensor], *, keeps_order: bool = False) -> Schema:
    """Return the schema of a message that holds these tensors.

    Args:
        tensors: the tensors.
        keeps_order: whether they arrive with their strides; gaps are closed.
    """
    return Schema(
        tuple(
            TensorSpec(
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                order_of(tensor) if keeps_order else (),
            )
            for tensor in tensors
        )
    )


def message_tag(schema: Schema, step: int, microbatch: int, salt: int = 0) -> int:
    """Return the name of one message on its channel.

    It holds the schema's digest and a digest of the batch, so that workers who disagree
    about either cannot mistake one message for another. 128 bits:

        salt (32) | schema's digest (32) | step (40) | microbatch (24)

    Args:
        schema: the message's schema.
        step: the step, counted over the whole run.
        microbatch: the microbatch of the step.
        salt: a digest of the batch, or 0.
    """
    assert 0 <= step < 1 << _STEP_BITS, step
    assert 0 <= microbatch < 1 << _MICROBATCH_BITS, microbatch
    high = (salt & _DIGEST_MASK) << _DIGEST_BITS | schema.digest
    return (high << _STEP_BITS | step) << _MICROBATCH_BITS | microbatch


def tag_digest(tag: int) -> int:
    """Return the digest of the schema in a tag."""
    return tag >> _STEP_BITS + _MICROBATCH_BITS & _DIGEST_MASK


def tag_salt(tag: int) -> int:
    """Return the digest of the batch in a tag."""
    return tag >> _DIGEST_BITS + _STEP_BITS + _MICROBATCH_BITS


def tag_text(tag: int) -> str:
    """Describe a tag's step and microbatch.

    >>> tag_text(message_tag(Schema(()), step=3, microbatch=1))
    'step 3, microbatch 1'
    """
    step = tag >> _MICROBATCH_BITS & (1 << _STEP_BITS) - 1
    return f"step {step}, microbatch {tag & (1 << _MICROBATCH_BITS) - 1}"


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise SchemaError(f"{spec}: torch has no type {spec.dtype!r}")
    return dtype


def _parse_spec(dtype: str, dims: str, order: str) -> TensorSpec:
    try:
        shape, places = (
            tuple(ANY if dim == "*" else int(dim) for dim in text.split(", ") if dim)
            for text in (dims, order)
        )
    except ValueError:
        raise SchemaError(
            f"{dtype}[{dims}] has dimensions that are no numbers"
        ) from None
    return TensorSpec(shape, dtype, places)
