"""Compiles all of a worker's stages before the first step.

All workers compile at the same time, and wait for each other afterwards: no worker
waits for a message while another compiles.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.core.op import Kind
from hocket.core.schedule import Schedule
from hocket.errors import ModelError
from hocket.model.stages.stage import StageModule
from hocket.run.data.batch import Microbatch
from hocket.run.data.loss import TOTAL, LossFunction, losses_of
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.stage.compiled.capture import (
    CannotCompileError,
    CompiledCapture,
    RequiredGraphs,
    capture_stage,
)
from hocket.run.stage.compiled.function import CompiledFunction, form_of
from hocket.run.stage.compiled.inputs import modules_of
from hocket.run.stage.compiled.lower import settings
from hocket.run.stage.compiled.trace import (
    FakeRun,
    empty,
    make_mode,
    on_fakes,
    run_on_fakes,
)
from hocket.run.stage.compiled.traceable import check_traceable
from hocket.run.stage.compiled.trial import check_compiled
from hocket.run.stage.precision import Precision

_TIMEOUT_S: Final = 3600.0  # for the slowest worker, when the fastest has ended
_MOST_LETTERS: Final = 300  # letters of torch's error message
_HOST: Final = torch.device("cpu")


class CompileWarning(UserWarning):
    """A stage could not be compiled and runs uncompiled."""


@dataclass(frozen=True, slots=True)
class CompileConfig:
    """What is compiled, and for which device and types.

    Args:
        modules: all stages, on the host.
        loss: the last stage's loss function.
        device: the device of this worker's stages.
        precision: the type that forwards compute in.
    """

    modules: Sequence[StageModule]
    loss: LossFunction
    device: torch.device
    precision: Precision


def compile_stages(
    work: CompileConfig,
    order: Schedule,
    parts: Sequence[Microbatch],
    context: WorkerContext,
) -> None:
    """Compile this worker's stages, in place. Every worker must call this.

    Args:
        work: what is compiled.
        order: one step.
        parts: microbatches of the sizes to compile for.
        context: this worker's context.

    Warns:
        CompileWarning: a stage runs uncompiled; says why.
    """
    sizes: Mapping[int, Microbatch] = {part.num_samples: part for part in parts}
    with settings():
        for stage in order.program.stages_on[context.layout.device]:
            needs = _required_graphs(order, stage)
            compile_stage(work, stage, needs, list(sizes.values()))
    context.world.barrier("compiling", _TIMEOUT_S)


def compile_stage(
    work: CompileConfig, stage: int, needs: RequiredGraphs, parts: Sequence[Microbatch]
) -> None:
    """Compile one stage in place; warn if that is impossible.

    Args:
        work: what is compiled.
        stage: the stage's number.
        needs: the graphs that the schedule needs.
        parts: microbatches of the sizes to compile for.
    """
    module = work.modules[stage]
    module.train()
    code = module.training_code
    function = CompiledFunction(code, len(code.state), work.device)
    for part in parts:
        try:
            with warnings.catch_warnings(action="ignore"):  # they are torch's own
                form, capture = _captured(work, stage, needs, part)
        except Exception as error:
            warnings.warn(_warning_text(stage, error), CompileWarning, stacklevel=2)
            return
        function.captures[form] = capture
    module.set_training_code(replace(code, function=function))


def _required_graphs(order: Schedule, stage: int) -> RequiredGraphs:
    kinds = {op.kind for lane in order.lanes for op in lane.ops if op.stage == stage}
    return RequiredGraphs(Kind.BACKWARD in kinds, Kind.BACKWARD_INPUT in kinds)


def _warning_text(stage: int, error: Exception) -> str:
    if isinstance(error, CannotCompileError | ModelError):
        why = str(error)
    else:
        reason = str(error).strip() or "no reason given"
        why = f"{type(error).__name__}: {reason.splitlines()[0][:_MOST_LETTERS]}"
    return f"stage {stage} is not compiled and runs uncompiled: {why}"


def _captured(
    work: CompileConfig, stage: int, needs: RequiredGraphs, part: Microbatch
) -> tuple[Any, CompiledCapture]:
    module = work.modules[stage]
    values = _values(work, stage, part)
    with check_traceable(modules_of(module.training_code)):
        fake_run = _seen(work, stage, values)
        if stage == len(work.modules) - 1:
            differentiated = _used(work, fake_run, part)
        else:
            differentiated = [
                x.requires_grad and value.requires_grad
                for x, value in zip(fake_run.outputs, module.outputs, strict=True)
            ]
        num_fixed = len(fake_run.call.args) - len(values)
        capture = capture_stage(fake_run, differentiated, num_fixed, needs)
    form = form_of(fake_run.call.args[len(module.training_code.state) :])
    return form, check_compiled(capture, fake_run)


def _seen(work: CompileConfig, stage: int, values: Sequence[Any]) -> FakeRun:
    module = work.modules[stage]
    args = (*module.training_arguments(values, _HOST), *values)
    autocast = work.precision.autocast(work.device)
    return run_on_fakes(module.training_code, args, work.device, autocast)


def _values(work: CompileConfig, stage: int, part: Microbatch) -> list[Any]:
    """Return what a stage gets with a microbatch, without memory."""
    module = work.modules[stage]
    types = {value.name: value.dtype for value in module.inputs}
    if work.precision is not Precision.FLOAT32:
        for source in module.received:
            made = _seen(work, source, _values(work, source, part)).outputs
            values = work.modules[source].outputs
            types |= {
                value.name: x.dtype for value, x in zip(values, made, strict=True)
            }
    received = [
        torch.empty(
            value.shape_for(part.num_samples),
            dtype=types[value.name],
            device="meta",
            requires_grad=value.requires_grad,
        )
        for value in module.inputs
    ]
    own = [part.leaves[i] for i in module.batch_inputs]
    return [*received, *(_without_memory(x) for x in own)]


def _without_memory(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _used(work: CompileConfig, fake_run: FakeRun, part: Microbatch) -> list[bool]:
    """Return, for each output of the model, whether the loss depends on it."""
    wants = [x.requires_grad for x in fake_run.outputs]
    if sum(wants) <= 1:
        return wants
    mode = make_mode()  # the loss may keep references to it
    outputs = [empty(mode, x.shape, x.dtype, work.device) for x in fake_run.outputs]
    leaves = [x.requires_grad_() for x in compress(outputs, wants)]
    try:
        with on_fakes(mode), work.precision.autocast(work.device):
            targets = pytree.tree_map_only(
                Tensor, lambda x: mode.from_tensor(x).to(work.device), part.targets
            )
            out = work.modules[-1].rebuilt(fake_run.shape.filled(outputs))
            total = losses_of(work.loss, out, targets)[TOTAL]
            grads = torch.autograd.grad(total, leaves, allow_unused=True)
    except Exception as error:
        raise CannotCompileError(
            f"the model returns {len(leaves)} tensors that want a gradient, and which "
            "of them the loss uses cannot be found out without data"
        ) from error
    found = iter(grads)
    return [wanted and next(found) is not None for wanted in wants]
