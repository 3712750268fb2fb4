"""The machine's speed: the same work again and again, on all workers at once.

    pretraining   ├ epoch ┤ probe ├ epoch ┤ probe ...    the pace, and its probes
    a run         probe ├ epoch ┤ probe ├ epoch ┤ ...    no step is timed in a probe

A run is predicted by a pace that was measured earlier. Where the machine, which others
use, too, has become slower or faster since, so has the probe.
"""

from __future__ import annotations

from statistics import fmean
from time import perf_counter
from typing import Final

import torch
from torch import nn

from hocket.run.cluster.world import World

_LASTS_S: Final = 0.2
_SHAPE: Final = (8, 65, 96)  # samples, tokens, width: a microbatch of the cases
_HEADS: Final = 4


class Probe:
    """Forwards and backwards of a transformer's block that nobody trains.

    Args:
        world: the job.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        with torch.random.fork_rng():
            torch.manual_seed(0)
            width = _SHAPE[-1]
            self._block = nn.TransformerEncoderLayer(
                width, _HEADS, 4 * width, dropout=0.0, batch_first=True
            )
            self._input = torch.randn(_SHAPE)
        self._once()
        self._once()

    def seconds(self) -> float:
        """Return the mean seconds of one piece of work; every worker must call this."""
        self._world.barrier("the machine's speed")
        number, begin_s = 0, perf_counter()
        while (now_s := perf_counter()) < begin_s + _LASTS_S:
            self._once()
            number += 1
        return fmean(self._world.gather_json((now_s - begin_s) / number, "a probe"))

    def _once(self) -> None:
        self._block.zero_grad()
        self._block(self._input).square().mean().backward()
