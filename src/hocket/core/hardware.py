"""List known devices and links, with their peaks and the fractions that are reached.

The numbers are in `hardware.toml` beside this file, each with its source. A user's file
of the same form overrides them.

    peak x achievable fraction = the speed that plans assume
     │              │
     a document     an assumption, with its reason
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, TypeAlias

from hocket.core.costs import Link
from hocket.core.formats.documents import lines_of_keys, read_text, read_toml
from hocket.errors import ParseError, PlanError
from hocket.nearest import nearest

PRECISIONS: Final = ("float32", "tf32", "bfloat16", "float16")
BUILT_IN: Final = "hocket's own hardware.toml"

_Entry: TypeAlias = Mapping[str, Any]
_Where: TypeAlias = Callable[..., str]  # names the place of an entry, by its key

_GIB: Final = 2**30
_MOST: Final = 1e30  # of any number here, in any unit
_DEVICE_NUMBERS: Final = ("memory_gib", "bandwidth_gb_per_s")
_DEVICE_ASSUMED: Final = ("bandwidth_fraction", "usable_fraction", "op_s")
_LINK_NUMBERS: Final = ("gb_per_s", "latency_s")


@dataclass(frozen=True, slots=True)
class Assumption:
    """A number that no document gives, and why it is what it is."""

    value: float
    why: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of device.

    Args:
        key: its name in files and options.
        name: its full name.
        memory_bytes: the size of its memory.
        bytes_per_s: the peak bandwidth of its memory.
        flops: the peak of matrix multiplications per second, by precision.
        links: the keys of links that can connect it, the usual one first.
        source: the document that these numbers are from.
        why: the reason for fractions of its own, if it has any.
        matmul_fraction: the part of the peak that matrix multiplications reach, by
            precision.
        bandwidth_fraction: the part of the memory's peak that other operators reach.
        usable_fraction: the part of the memory that a model may use.
        op_s: the shortest time that any operator takes.
    """

    key: str
    name: str
    memory_bytes: int
    bytes_per_s: float
    flops: Mapping[str, float]
    links: tuple[str, ...]
    source: str
    why: str
    matmul_fraction: Mapping[str, float]
    bandwidth_fraction: float
    usable_fraction: float
    op_s: float

    @property
    def usable_bytes(self) -> int:
        """What weights, gradients, optimizer state and activations may take."""
        return int(self.memory_bytes * self.usable_fraction)

    @property
    def reached_bytes_per_s(self) -> float:
        """What element-wise operators reach."""
        return self.bytes_per_s * self.bandwidth_fraction

    def reached_flops(self, precision: str) -> float:
        """Return what matrix multiplications reach.

        Raises:
            PlanError: the device has no such precision; names those that it has.
        """
        if precision not in self.flops:
            raise PlanError(
                f"{self.name} does not multiply in {precision!r}: use "
                f"{' or '.join(self.flops)}"
            )
        return self.flops[precision] * self.matmul_fraction[precision]


def multiplied_in(precision: str) -> str:
    """Return the type of matrix multiplications: of "bfloat16-weights", bfloat16."""
    return precision.removesuffix("-weights")


@dataclass(frozen=True, slots=True)
class LinkKind:
    """One way from device to device.

    Args:
        key: its name in files and options.
        name: its full name.
        bytes_per_s: the peak in one direction.
        latency_s: the time until the last byte is usable.
        fraction: the part of the peak that messages reach.
        source: the document that gives the peak.
    """

    key: str
    name: str
    bytes_per_s: float
    latency_s: float
    fraction: float
    source: str

    def link(self, num_sharing: int = 1) -> Link:
        """Return the share of the link that one of several equal users gets."""
        return Link(self.latency_s, self.bytes_per_s * self.fraction / num_sharing)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All known devices and links.

    Args:
        devices: every device, by key.
        links: every link, by key.
        assumed: the fractions of devices and links that have none of their own.
    """

    devices: Mapping[str, Hardware]
    links: Mapping[str, LinkKind]
    assumed: Mapping[str, Assumption]

    def device(self, key: str) -> Hardware:
        """Look up a device by its key.

        Raises:
            PlanError: there is none; names the nearest.
        """
        if key.lower() not in self.devices:
            raise PlanError(f"no device is named {key!r}; {nearest(key, self.devices)}")
        return self.devices[key.lower()]

    def link(self, key: str, device: Hardware | None = None) -> LinkKind:
        """Look up a link by its key; `nvlink` and `pcie` are the device's own.

        Raises:
            PlanError: there is none; names the nearest.
        """
        own = () if device is None else device.links
        found = next((name for name in own if name.startswith(key.lower())), key)
        if found.lower() not in self.links:
            raise PlanError(f"no link is named {key!r}; {nearest(key, self.links)}")
        return self.links[found.lower()]


def load_catalogue(path: Path | None = None) -> Catalogue:
    """Load hocket's own numbers, and override them by a file of the user's.

    Args:
        path: a TOML file of the same form as hocket's own.

    Raises:
        ParseError: the file cannot be read, or has an unknown key; names the path, the
            line and the key.
    """
    return _built_in() if path is None else _laid_over(path)


@cache
def _built_in() -> Catalogue:
    return _catalogue(_own_document(), lambda *_: BUILT_IN)


def _own_document() -> dict[str, Any]:
    text = (files("hocket.core") / "hardware.toml").read_text(encoding="utf-8")
    return read_toml(text)


def _laid_over(path: Path) -> Catalogue:
    text = read_text(path)
    try:
        given = read_toml(text)
    except ValueError as error:
        raise ParseError(f"{path}: cannot be read as TOML: {error}") from None
    lines = {
        tuple(part.lower() for part in key): number
        for key, number in lines_of_keys(text).items()
    }

    def where(*key: str) -> str:
        said = (n for known, n in lines.items() if known[: len(key)] == key)
        return f"{path}, line {min(said, default=1)}: [{'.'.join(key)}]"

    known = _own_document()
    for section, entries in given.items():
        if section not in known or not isinstance(entries, dict):
            raise ParseError(
                f"{where(section)} is no section; there are [devices.NAME], "
                "[links.NAME] and [assumed.NAME]"
            )
        known[section].update({name.lower(): one for name, one in entries.items()})
    return _catalogue(known, where)


def _catalogue(document: Mapping[str, Any], where: _Where) -> Catalogue:
    assumed = {
        name: Assumption(
            _number(entry, "value", where("assumed", name)),
            str(entry.get("why", "")),
        )
        for name, entry in document["assumed"].items()
    }
    links = {
        key: _link(key, entry, assumed, where("links", key))
        for key, entry in document["links"].items()
    }
    devices = {
        key: _device(key, entry, assumed, where("devices", key))
        for key, entry in document["devices"].items()
    }
    for device in devices.values():
        for link in device.links:
            if link not in links:
                raise ParseError(
                    f"{where('devices', device.key)} links: {link!r} is no link; "
                    f"{nearest(link, links)}"
                )
    return Catalogue(devices, links, assumed)


def _device(
    key: str, entry: _Entry, assumed: Mapping[str, Assumption], where: str
) -> Hardware:
    words = ("name", "tflops", "matmul_fraction", "links", "source", "why")
    names = (*words, *_DEVICE_NUMBERS, *_DEVICE_ASSUMED)
    _check_keys(entry, names, ("tflops", "source", *_DEVICE_NUMBERS), where)
    tflops = entry["tflops"]
    if not isinstance(tflops, dict) or not tflops or set(tflops) - set(PRECISIONS):
        raise ParseError(
            f"{where} tflops: must give numbers for some of {', '.join(PRECISIONS)}"
        )
    memory_gib, bandwidth = (_number(entry, x, where) for x in _DEVICE_NUMBERS)
    reached = entry.get("matmul_fraction", {})
    if not isinstance(reached, dict):
        reached = dict.fromkeys(tflops, reached)
    usual = assumed["matmul_fraction"].value
    links = entry.get("links", [])
    if not isinstance(links, list) or not all(isinstance(x, str) for x in links):
        raise ParseError(f"{where} links: must be a list of names")
    fractions = {
        name: _number(entry, name, where, assumed[name].value)
        for name in _DEVICE_ASSUMED
    }
    return Hardware(
        key=key,
        name=str(entry.get("name", key)),
        memory_bytes=int(memory_gib * _GIB),
        bytes_per_s=bandwidth * 1e9,
        flops={name: _number(tflops, name, where) * 1e12 for name in tflops},
        links=tuple(links),
        source=str(entry["source"]),
        why=str(entry.get("why", "")),
        matmul_fraction={
            name: _number(reached, name, f"{where} matmul_fraction", usual)
            for name in tflops
        },
        **fractions,
    )


def _link(
    key: str, entry: _Entry, assumed: Mapping[str, Assumption], where: str
) -> LinkKind:
    names = ("name", "fraction", "source", *_LINK_NUMBERS)
    _check_keys(entry, names, ("source", *_LINK_NUMBERS), where)
    rate, latency_s = (_number(entry, name, where) for name in _LINK_NUMBERS)
    fraction = _number(entry, "fraction", where, assumed["link_fraction"].value)
    return LinkKind(
        key,
        str(entry.get("name", key)),
        rate * 1e9,
        latency_s,
        fraction,
        str(entry["source"]),
    )


def _check_keys(
    entry: object, known: tuple[str, ...], needed: tuple[str, ...], where: str
) -> None:
    faults = [*_key_faults(entry, known, needed)]
    if faults:
        raise ParseError(f"{where}: {'; '.join(faults)}")


def _key_faults(
    entry: object, known: tuple[str, ...], needed: tuple[str, ...]
) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield "must be a table"
        return
    for name in entry:
        if name not in known:
            yield f"no key is named {name!r}, {nearest(name, known)}"
    missing = [name for name in needed if name not in entry]
    if missing:
        yield f"{', '.join(missing)} must be given"


def _number(
    entry: Mapping[str, Any], name: str, where: str, default: float | None = None
) -> float:
    value = entry.get(name, default) if isinstance(entry, dict) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not is_number or not 0 < value <= _MOST:
        raise ParseError(
            f"{where} {name}: must be a number above 0, got {reprlib.repr(value)}"
        )
    return float(value)
