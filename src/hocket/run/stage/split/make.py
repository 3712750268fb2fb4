"""Makes the splitter that is asked for."""

from __future__ import annotations

from typing import Final, assert_never

from hocket.model.stages.stage import StageModule
from hocket.run.stage.split.by_graph import ByGraph
from hocket.run.stage.split.by_layers import ByLayers
from hocket.run.stage.split.layers.pending import Pending
from hocket.run.stage.split.splitter import Remainder, SplitBy, Splitter

NOTHING_LEFT: Final[Remainder] = Pending(())


def make_splitter(by: SplitBy, stage: StageModule) -> Splitter:
    """Make a stage's splitter.

    Args:
        by: how to split.
        stage: the stage's module.
    """
    match by:
        case SplitBy.LAYERS:
            return ByLayers(stage)
        case SplitBy.GRAPH:
            return ByGraph(stage)
        case _:
            assert_never(by)
