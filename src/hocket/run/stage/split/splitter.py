"""The ways to split a backward into I and W."""

from __future__ import annotations

from enum import Enum


class SplitBy(Enum):
    """The way to split a backward into I and W."""

    LAYERS = "layers"  # the weights of some layers wait: fast, and holds little
    GRAPH = "graph"  # every weight waits: slow, and holds all that the forward kept
