"""One entry: what the frozen layers compute of one sample, and what it depends on."""

from __future__ import annotations

import struct
import zlib
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Content: TypeAlias = NDArray[np.uint8]  # of one entry, 1-dimensional

_KEY: Final = struct.Struct("<16sIIq")
_RECORD: Final = struct.Struct("<16sIIqII")
RECORD_BYTES: Final = _RECORD.size


class Key(NamedTuple):
    """Everything that an entry depends on: entries of other keys are never used.

    Args:
        prefix: a digest of the frozen layers, their weights and their buffers; 16
            bytes, not all of them 0.
        data: a digest of the data set, and of the draw of its random transforms.
        form: a digest of the shapes and types of the sample's inputs.
        sample: the sample's row in the data set.
    """

    prefix: bytes
    data: int
    form: int
    sample: int


class Record(NamedTuple):
    """What a file says of an entry.

    Args:
        key: the entry's key.
        num_bytes: the content's length.
        checksum: the CRC-32 of the key and the content together.
    """

    key: Key
    num_bytes: int
    checksum: int

    @classmethod
    def of(cls, key: Key, content: Content) -> Record:
        """Return the record of an entry."""
        return cls(
            key, len(content), zlib.crc32(content.data, zlib.crc32(_KEY.pack(*key)))
        )

    @classmethod
    def parse(cls, text: bytes) -> Record | None:
        """Return what `pack` has written; None where there is no entry."""
        *key, num_bytes, checksum = _RECORD.unpack(text)
        return cls(Key(*key), num_bytes, checksum) if any(key[0]) else None

    def pack(self) -> bytes:
        """Return it as `RECORD_BYTES` bytes."""
        return _RECORD.pack(*self.key, self.num_bytes, self.checksum)
