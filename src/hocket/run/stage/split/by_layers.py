"""Splits a backward layer by layer: some layers' weight gradients wait for W."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from hocket.model.stages.reroute import rerouted, runs_modules
from hocket.model.stages.splitter import SplitGradients, Starts
from hocket.model.stages.stage import StageModule
from hocket.run.stage.backward import run_backward
from hocket.run.stage.split.layers.deferral import Deferral
from hocket.run.stage.split.module_routes import ModuleRoutes
from hocket.run.stage.split.routes import make_routes


class ByLayers:
    """Splits the backwards of one stage.

    Args:
        stage: the stage's module.
    """

    def __init__(self, stage: StageModule) -> None:
        self._deferral = Deferral()
        routes = make_routes(self._deferral)
        self._watch: AbstractContextManager[object] = nullcontext()
        if stage.runs_backward:  # which would be taken for I
            self.module = stage
        elif runs_modules(stage):
            self.module = stage
            self._watch = ModuleRoutes(routes, stage)
        else:
            self.module = rerouted(stage, routes)

    def on(self) -> AbstractContextManager[object]:
        """See `Splitter.on`."""
        return self._watch

    def input_gradients(
        self, starts: Starts, grads: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> SplitGradients:
        """See `Splitter.input_gradients`.

        Parameters whose gradients do not wait get them here.
        """
        if starts:
            # Modules with activation checkpointing run their forward again in here.
            with self.on():
                run_backward(starts, grads)
        return [leaf.grad for leaf in leaves], self._deferral.take()
