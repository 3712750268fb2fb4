"""Finds the layers that extend what is kept to a later boundary.

kept of  [a b]      before
run      [c d]      between, on what is kept of b
keep     [a b c d]  now
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hocket.model.stages.cut import StageModule, cut
from hocket.model.stages.on_tensors import on_tensors
from hocket.run.elastic.cache.frozen_part import FrozenPart
from hocket.run.elastic.cache.prefix_digest import prefix_digest
from hocket.run.nets.net import NetOnWorker
from hocket.run.stage.precision import Precision
from hocket.run.stage.runner import StageRunner


@dataclass(frozen=True, slots=True)
class Extension:
    """What extends outputs that are kept.

    Args:
        before: the frozen layers of before.
        between: runs those that have been frozen since.
    """

    before: FrozenPart
    between: StageRunner


@dataclass(frozen=True, slots=True)
class PartMaker:
    """Makes the parts of a net whose outputs are kept.

    Args:
        net: the net, with this worker's stages.
        precision: the type that it computes in.
        device: where it runs.
        kept_as: the type that floating-point numbers are kept in; None: as computed.
    """

    net: NetOnWorker
    precision: Precision
    device: torch.device
    kept_as: str | None

    def part(self, runner: StageRunner) -> FrozenPart:
        """Return the part that a runner runs."""
        digest = prefix_digest(runner.module, self.device, self.precision, self.kept_as)
        return FrozenPart(runner, digest, self.kept_as)

    def extension(
        self, before: int, boundary: int, present: StageModule
    ) -> Extension | None:
        """Return what extends outputs at one boundary to another.

        Args:
            before: the boundary of what is kept.
            boundary: the present one.
            present: all frozen layers.

        Returns:
            None where other values cross the boundaries than the layers between give.
        """
        if not 0 < before < boundary:
            return None
        outline = on_tensors(self.net.outline, self.net.tensors)
        first, second, *_ = cut(outline, (before, boundary))
        sent = [x.name for x in first.outputs], [x.name for x in present.outputs]
        if ([x.name for x in second.inputs], [x.name for x in second.outputs]) != sent:
            return None
        return Extension(self.part(self._runner(first)), self._runner(second))

    def _runner(self, module: StageModule) -> StageRunner:
        runner = StageRunner(
            module.index,
            module,
            None,
            device=self.device,
            seed=0,
            precision=self.precision,
            trainable=False,
            training=False,
        )
        runner.train(mode=False)
        return runner
