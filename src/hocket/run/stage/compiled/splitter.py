"""Splits the backwards of a compiled stage into I and W, and chooses a splitter."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hocket.model.stages.splitter import SplitGradients, Splitter, Starts
from hocket.model.stages.stage import StageModule
from hocket.run.stage.compiled.function import CompiledFunction
from hocket.run.stage.compiled.remainder import CompiledRemainder
from hocket.run.stage.split.by_layers import ByLayers


def make_splitter(stage: StageModule) -> Splitter:
    """Make a stage's splitter: by graphs if it is compiled, or else by layers."""
    if isinstance(stage.training_code.function, CompiledFunction):
        return ByCompiled(stage)
    return ByLayers(stage)


class ByCompiled:
    """Splits one stage's backwards; those of other sizes, layer by layer.

    Args:
        stage: the stage whose training code is compiled.
    """

    def __init__(self, stage: StageModule) -> None:
        function = stage.training_code.function
        assert isinstance(function, CompiledFunction)
        self._layers = ByLayers(stage)
        other = self._layers.module.training_code.function
        self._other = function.code.function if other is function else other
        self._function = function
        self._pending: list[CompiledRemainder] = []
        code = replace(stage.training_code, function=self._run)
        self.module = stage.with_training_code(code)

    def on(self) -> AbstractContextManager[object]:
        """See `Splitter.on`."""
        return self._layers.on()

    def input_gradients(
        self, starts: Starts, grads: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> SplitGradients:
        """See `Splitter.input_gradients`."""
        found, left = self._layers.input_gradients(starts, grads, leaves)
        return found, self._pending.pop() if self._pending else left

    def _run(self, objects: Any, device: torch.device, *args: Any) -> Any:
        capture = self._function.found(args)
        if capture is None:
            return self._other(objects, device, *args)
        return self._function.run(capture, args, self._pending)
