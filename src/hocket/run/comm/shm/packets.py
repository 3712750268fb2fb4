"""The packets between the two ends of a shared-memory channel.

to the receiver   MessagePacket   the next slot is filled
                  SchemaPacket    a schema is used for the first time
to the sender     CreditPacket    so many slots are free again
                  ErrorPacket     why the receiver gives up
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

MAX_PACKET_BYTES: Final = 2048

_MESSAGE: Final = struct.Struct("=cQQI")
_ANNOUNCEMENT: Final = struct.Struct("=cIQ")
_TAKEN: Final = struct.Struct("=cI")
_MAX_TEXT_BYTES: Final = MAX_PACKET_BYTES - 64
_LOW: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class MessagePacket:
    """Says that a slot is filled.

    Args:
        tag: the message's tag.
        slot: the slot's number.
    """

    tag: int
    slot: int


@dataclass(frozen=True, slots=True)
class SchemaPacket:
    """Announces messages of a new schema.

    Args:
        digest: the schema's digest.
        slot_bytes: the slot size of new memory, whose descriptor comes with the packet;
            or 0.
        text: the schema; cut off if it is very long, for it serves errors only.
    """

    digest: int
    slot_bytes: int
    text: str


@dataclass(frozen=True, slots=True)
class CreditPacket:
    """Says how many messages, the oldest, the receiver took out of their slots."""

    count: int


@dataclass(frozen=True, slots=True)
class ErrorPacket:
    """Says why the receiver gives up; the sender raises this text too."""

    text: str


Packet: TypeAlias = MessagePacket | SchemaPacket | CreditPacket | ErrorPacket


def pack(packet: Packet) -> bytes:
    """Encode a packet as bytes: a letter, numbers, and at the end the text."""
    match packet:
        case MessagePacket(tag, slot):
            return _MESSAGE.pack(b"M", tag >> 64, tag & _LOW, slot)
        case SchemaPacket(digest, slot_bytes, text):
            return _ANNOUNCEMENT.pack(b"A", digest, slot_bytes) + _cut(text)
        case CreditPacket(count):
            return _TAKEN.pack(b"T", count)
        case ErrorPacket(text):
            return b"C" + _cut(text)
        case _:
            assert_never(packet)


def unpack(data: bytes) -> Packet:
    """Decode what `pack` returned."""
    match data[:1]:
        case b"M":
            _, high, low, slot = _MESSAGE.unpack(data)
            return MessagePacket(high << 64 | low, slot)
        case b"A":
            _, digest, slot_bytes = _ANNOUNCEMENT.unpack_from(data)
            return SchemaPacket(digest, slot_bytes, _text(data, _ANNOUNCEMENT.size))
        case b"T":
            _, count = _TAKEN.unpack(data)
            return CreditPacket(count)
        case b"C":
            return ErrorPacket(_text(data, 1))
        case letter:
            raise AssertionError(f"no packet begins with {letter!r}")


def _cut(text: str) -> bytes:
    return text.encode()[:_MAX_TEXT_BYTES]


def _text(data: bytes, begin: int) -> str:
    return data[begin:].decode(errors="ignore")
