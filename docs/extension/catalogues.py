"""The directives `schedules` and `hardware`: what the library's two tables hold."""

from __future__ import annotations

import textwrap
from typing import Any, Final

from docutils import nodes
from public_names import function_of
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import hocket
from hocket.core import hardware
from hocket.core.hardware import load_catalogue


def section_of(name: str, text: str, *, anchor: str = "") -> nodes.section:
    """A section that links can point to, with a text letter by letter."""
    section = nodes.section(ids=[anchor or nodes.make_id(name)], names=[name])
    section += nodes.title(text=name)
    section += nodes.literal_block(text, text, language="text")
    return section


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
        sections = []
        for name, entry in hocket.SCHEDULES.items():
            section = nodes.section(ids=[nodes.make_id(name)], names=[name])
            section += nodes.title(text=name)
            section += self.parse_text_to_nodes(function_of(entry.make))
            sections.append(section)
        return sections


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives with Sphinx."""
    app.add_directive("schedules", Schedules)
    app.add_directive("hardware", Hardware)
    return {"parallel_read_safe": True}
