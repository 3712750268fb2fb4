"""Stages compiled in the tests' own process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hocket.model.stages.stage import StageModule
from hocket.run.data.batch import Microbatch
from hocket.run.data.loss import LossFunction
from hocket.run.stage.compiled.capture import RequiredGraphs
from hocket.run.stage.compiled.function import CompiledFunction
from hocket.run.stage.compiled.lower import settings
from hocket.run.stage.precision import Precision
from hocket.run.stage.runner import StageRunner
from hocket.run.tune.compile_stages import CompileConfig, compile_stage

CPU = torch.device("cpu")
BOTH = RequiredGraphs(whole=True, split=True)


def compile_one(
    modules: Sequence[StageModule],
    stage: int,
    loss: LossFunction,
    parts: Sequence[Microbatch],
    *,
    needs: RequiredGraphs = BOTH,
    precision: Precision = Precision.FLOAT32,
) -> None:
    """Compile one stage for these microbatches, or warn."""
    work = CompileConfig(modules, loss, CPU, precision)
    with settings():
        compile_stage(work, stage, needs, parts)


def function_of(runner: StageRunner) -> CompiledFunction:
    """What a stage that was compiled calls."""
    function = runner.module.training_code.function
    assert isinstance(function, CompiledFunction)
    return function
