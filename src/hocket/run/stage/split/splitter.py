"""How a backward is split into I and W."""

from __future__ import annotations

from enum import Enum

from hocket.model.stages.splitter import Remainder, SplitGradients, Splitter, Starts

__all__ = ["Remainder", "SplitBy", "SplitGradients", "Splitter", "Starts"]


class SplitBy(Enum):
    """How a backward is split into I and W."""

    LAYERS = "layers"  # the weights of some layers wait: fast, and holds little
    GRAPH = "graph"  # every weight waits: slow, and holds all that the forward kept
