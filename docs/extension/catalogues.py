"""Sphinx directives that show public names and schedules in their own words.

The docstrings stand on the page letter by letter, because they hold pictures of
schedules and formulas; nothing is written down twice.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, Final

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.inspect import stringify_signature

import hocket
from hocket.core import hardware
from hocket.core.hardware import load_catalogue


def headline_of(name: str, value: object) -> str:
    """How a name is used: what it takes, or else of what type it is."""
    if isinstance(value, type) and issubclass(value, Exception):
        return f"{name}({value.__mro__[1].__name__})"
    if isinstance(value, type) and issubclass(value, Enum):
        return f"{name}: {', '.join(value.__members__)}"
    if not callable(value):
        return f"{name}: {type(value).__name__}"
    return name + stringify_signature(
        inspect.signature(value),
        show_return_annotation=not isinstance(value, type),
        unqualified_typehints=True,
    )


def text_of(name: str, value: object) -> str:
    """The headline, and below it the docstring where the value has one of its own."""
    doc = inspect.getdoc(value) if callable(value) else None
    if isinstance(value, type) and is_dataclass(value):
        # A dataclass documents its own fields, and its base classes document theirs.
        bases = [base for base in value.__mro__[1:] if is_dataclass(base)]
        doc = "\n\n".join([doc or "", *(inspect.getdoc(base) or "" for base in bases)])
    headline = textwrap.fill(headline_of(name, value), 80, subsequent_indent="    ")
    return headline + (f"\n\n{doc}" if doc else "")


def section_of(name: str, text: str, *, anchor: str = "") -> nodes.section:
    """A section that links can point to, with a text letter by letter."""
    section = nodes.section(ids=[anchor or nodes.make_id(name)], names=[name])
    section += nodes.title(text=name)
    section += nodes.literal_block(text, text, language="text")
    return section


class PublicNames(SphinxDirective):
    """`public-names`: a section for each name in `hocket.__all__`."""

    def run(self) -> list[nodes.Node]:
        """Make the sections, in the order of `__all__`."""
        names = set(hocket.__all__)
        return [
            section_of(
                name,
                text_of(name, getattr(hocket, name)),
                # `Plan` and `plan` are two names, but would be one anchor.
                anchor=f"{name}-class" if {name.lower()} & names - {name} else "",
            )
            for name in hocket.__all__
        ]


class Hardware(SphinxDirective):
    """`hardware`: what the catalogue holds, with sources and reasons."""

    def run(self) -> list[nodes.Node]:
        """Make a section for the devices, the links and the assumptions."""
        known = load_catalogue()
        devices = [_device_text(device) for device in known.devices.values()]
        links = [
            f"{link.key}\n    {link.name}: {link.bytes_per_s / 1e9:g} GB/s in one "
            f"direction, {link.latency_s * 1e6:g} µs\n"
            + textwrap.fill(link.source, 84, initial_indent=INDENT, **HANGING)
            for link in known.links.values()
        ]
        assumed = [
            f"{name} = {one.value:g}\n"
            + textwrap.fill(one.why, 84, initial_indent=INDENT, **HANGING)
            for name, one in known.assumed.items()
        ]
        return [
            section_of("Devices", "\n\n".join(devices)),
            section_of("Links", "\n\n".join(links)),
            section_of("Assumptions", "\n\n".join(assumed)),
        ]


INDENT: Final = "    "
HANGING: Final[dict[str, Any]] = {"subsequent_indent": INDENT}


def _device_text(device: hardware.Hardware) -> str:
    """What a device has, and what a plan counts with."""
    peaks = ", ".join(f"{name} {x / 1e12:g}" for name, x in device.flops.items())
    return (
        f"{device.key}\n    {device.name}: {device.memory_bytes / 2**30:g} GiB, "
        f"{device.bytes_per_s / 1e9:g} GB/s\n    TFLOP/s: {peaks}\n    "
        f"links: {', '.join(device.links)}\n"
        + "\n".join(
            textwrap.fill(text, 84, initial_indent=INDENT, **HANGING)
            for text in (device.source, _fractions_text(device))
            if text
        )
    )


def _fractions_text(device: hardware.Hardware) -> str:
    """What it reaches of its peak, where that has a reason of its own."""
    if not device.why:
        return ""
    pairs = device.matmul_fraction.items()
    reached = ", ".join(f"{name} {fraction:g}" for name, fraction in pairs)
    return f"assumed matmul_fraction: {reached}. {device.why}"


class Schedules(SphinxDirective):
    """`schedules`: a section for each schedule of the table."""

    def run(self) -> list[nodes.Node]:
        """Make the sections, in the order of the table."""
        return [
            section_of(name, inspect.getdoc(entry.make) or "")
            for name, entry in hocket.SCHEDULES.items()
        ]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives with Sphinx."""
    app.add_directive("public-names", PublicNames)
    app.add_directive("schedules", Schedules)
    app.add_directive("hardware", Hardware)
    return {"parallel_read_safe": True}
