"""Compiles all of a worker's stages before the first step.

All workers compile at the same time, and wait for each other afterwards: no worker
waits for a message while another compiles.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
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
from hocket.model.trace.value import ordered
from hocket.run.data.batch import Microbatch
from hocket.run.data.loss import TOTAL, LossFunction, losses_of
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.stage.compiled.capture import (
    CannotCompileError,
    CompiledCapture,
    RequiredGraphs,
    capture_stage,
)
from hocket.run.stage.compiled.function import (
    CompiledFunction,
    CompileWarning,
    form_of,
)
from hocket.run.stage.compiled.inputs import modules_of
from hocket.run.stage.compiled.lower import settings
from hocket.run.stage.compiled.trace import (
    FakeRun,
    empty,
    make_mode,
    on_fakes,
    run_on_fakes,
)
from hocket.run.stage.compiled.traceable import DrawnNumbersError, check_traceable
from hocket.run.stage.compiled.trial import check_compiled
from hocket.run.stage.precision import Precision

_TIMEOUT_S: Final = 3600.0  # for the slowest worker, when the fastest has ended
_MOST_LETTERS: Final = 300  # letters of torch's error message
_HOST: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class CompileConfig:
    """What is compiled, and for which device and types.

    Args:
        modules: all stages of one net, on the host.
        loss: the last stage's loss function; None of a net without backwards.
        device: the device of this worker's stages.
        precision: the type that forwards compute in.
        first: the number of the net's first stage in the order.
        training: the mode in which the net runs.
        read: the outputs of other nets for the first microbatch, which the loss reads.
    """

    modules: Sequence[StageModule]
    loss: LossFunction | None
    device: torch.device
    precision: Precision
    first: int = 0
    training: bool = True
    read: tuple[Any, ...] = ()


def compile_stages(
    nets: Sequence[tuple[CompileConfig, Sequence[Microbatch]]],
    order: Schedule,
    context: WorkerContext,
) -> None:
    """Compile this worker's stages, in place. Every worker must call this.

    Args:
        nets: what is compiled of each net, and microbatches of the sizes to compile
            for.
        order: the order of all nets.
        context: this worker's context.

    Warns:
        CompileWarning: a stage runs uncompiled; says why.
    """
    here = order.program.stages_on[context.layout.device]
    with settings():
        for work, parts in nets:
            sizes = {part.num_samples: part for part in parts}
            for stage in range(len(work.modules)):
                number = work.first + stage
                if number in here:
                    needs = _required_graphs(order, number)
                    compile_stage(work, stage, needs, list(sizes.values()))
    context.world.barrier("compiling", _TIMEOUT_S)


def compile_stage(
    work: CompileConfig, stage: int, needs: RequiredGraphs, parts: Sequence[Microbatch]
) -> None:
    """Compile one stage in place; warn if that is impossible.

    Args:
        work: what is compiled.
        stage: the stage's number in its net.
        needs: the graphs that the schedule needs.
        parts: microbatches of the sizes to compile for.
    """
    module = work.modules[stage]
    module.train(work.training)
    code = module.code_in(training=work.training)
    has_backward = work.loss is not None
    function = CompiledFunction(
        code, len(code.state), work.device, has_backward=has_backward
    )
    for part in parts:
        try:
            with warnings.catch_warnings(action="ignore"):  # they are torch's own
                try:
                    form, capture = _captured(work, stage, needs, part)
                except DrawnNumbersError:  # a compiler's first start may draw some
                    form, capture = _captured(work, stage, needs, part)
        except Exception as error:
            text = _warning_text(work.first + stage, error)
            warnings.warn(text, CompileWarning, stacklevel=2)
            return
        function.captures[form] = capture
    module.set_code_in(replace(code, function=function), training=work.training)


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
    code = module.code_in(training=work.training)
    values = _values(work, stage, part)
    with check_traceable(modules_of(code)):
        fake_run = _seen(work, stage, values)
        if work.loss is None:
            differentiated = [False] * len(fake_run.outputs)
        elif stage == len(work.modules) - 1:
            differentiated = _used(work, fake_run, part)
        else:
            differentiated = [
                x.requires_grad and value.requires_grad
                for x, value in zip(fake_run.outputs, module.outputs, strict=True)
            ]
        num_fixed = len(fake_run.call.args) - len(values)
        capture = capture_stage(fake_run, differentiated, num_fixed, needs)
    form = form_of(fake_run.call.args[len(code.state) :])
    return form, check_compiled(capture, fake_run)


def _seen(work: CompileConfig, stage: int, values: Sequence[Any]) -> FakeRun:
    module, training = work.modules[stage], work.training
    args = (*module.arguments_in(values, _HOST, training=training), *values)
    autocast = work.precision.autocast(work.device)
    code = module.code_in(training=training)
    return run_on_fakes(code, args, work.device, autocast)


def _values(work: CompileConfig, stage: int, part: Microbatch) -> list[Any]:
    """Return what a stage gets with a microbatch, without memory."""
    module = work.modules[stage]
    types = {value.name: value.dtype for value in module.inputs}
    if work.precision.is_autocast:
        for source in module.received:
            made = _seen(work, source, _values(work, source, part)).outputs
            values = work.modules[source].outputs
            types |= {
                value.name: x.dtype for value, x in zip(values, made, strict=True)
            }
    received = [
        ordered(
            torch.empty(shape, dtype=types[value.name], device="meta"),
            shape,
            value.order,
        ).requires_grad_(value.requires_grad and work.loss is not None)
        for value in module.inputs
        for shape in [value.shape_for(part.num_samples)]
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
            targets, read = pytree.tree_map_only(
                Tensor,
                lambda x: mode.from_tensor(x).to(work.device),
                (part.targets, work.read),
            )
            out = work.modules[-1].rebuilt(fake_run.shape.filled(outputs))
            assert work.loss is not None
            total = losses_of(work.loss, out, targets, *read)[TOTAL]
            grads = torch.autograd.grad(total, leaves, allow_unused=True)
    except Exception as error:
        raise CannotCompileError(
            f"the model returns {len(leaves)} tensors that want a gradient, and which "
            "of them the loss uses cannot be found out without data"
        ) from error
    found = iter(grads)
    return [wanted and next(found) is not None for wanted in wants]
