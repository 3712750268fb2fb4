"""Make what runs the stages of a program on one device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from hocket.core.program import Program
from hocket.model.stages.stage import StageModule
from hocket.run.engine.lanes.wiring import Wiring
from hocket.run.engine.programs.net_setup import (
    NetSetup,
    modules_of,
    nets_of_batch,
    training_of,
)
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.stage.loss_checks.reads import LossReads, PlayedStage
from hocket.run.stage.runner import StageRunner
from hocket.run.stage.saved_forward import StageGradients


def make_runners(
    program: Program,
    nets: Sequence[NetSetup],
    context: WorkerContext,
    wiring: Wiring,
    *,
    seed: int,
    recomputes: Collection[int],
    checks_loss: bool = True,
) -> dict[int, StageRunner]:
    """Make the runners of this worker's stages, by number.

    Args:
        program: all nets.
        nets: how each of them is set up.
        context: this worker's.
        wiring: which values go along each flow.
        seed: for random numbers.
        recomputes: the stages that run their forward again in the backward.
        checks_loss: whether the first step checks that each loss is a mean over
            samples, if there are several microbatches.
    """
    layout, device, settings = context.layout, context.world.device, training_of(nets)
    modules, by_net = modules_of(program, nets), {net.name: net for net in nets}
    counts = {net.name: net.num_microbatches for net in program.nets}
    runners: dict[int, StageRunner] = {}
    for stage in program.stages_on[layout.device]:
        module, facts = modules[stage], program.stages[stage]
        net, copies = by_net[facts.net], nets_of_batch(program, facts.net)
        each = sum(counts[name] for name in copies)
        before = sum(counts[name] for name in copies[: copies.index(net.name)])
        num_parts = each * layout.num_pipelines * settings.accumulate
        loss = net.loss if module.is_last else None
        is_whole = program.net_of(stage).batch_loss
        others = net.others.get(stage, ())
        runner = runners[stage] = StageRunner(
            stage,
            module.to(device),
            None if is_whole else loss,
            device=device,
            seed=seed,
            net=net.seed_name,
            first_microbatch=layout.pipeline * each + before,
            precision=settings.compute_precision,
            recomputes=stage in recomputes,
            checks_loss=checks_loss and num_parts > 1,
            trainable=facts.trainable,
            training=net.training and module.index >= net.num_frozen,
            gradients=_gradients(program, stage, module, wiring),
            others=() if stage in program.loss_stages else others,
            saved_prefix=net.saved_prefix,
        )
        runner.loss.batch_function = loss if is_whole else None
        # Not a part of it; and not a copy, as of batches that are read ahead.
        runner.loss.owns_batch = not checks_loss or num_parts == program.num_steps == 1
        runner.loss.others = others if loss else ()
        if loss and net.tensors:
            played = partial(_played, program, net.name, runners)
            runner.loss.reads = LossReads(loss, net.tensors, played)
    return runners


def _gradients(
    program: Program, stage: int, module: StageModule, wiring: Wiring
) -> StageGradients | None:
    if stage not in wiring.takes_grad:
        return None
    takes = wiring.takes_grad[stage]
    takes = takes[: len(module.inputs)] if stage in program.loss_stages else takes
    return StageGradients(takes, wiring.gives_grad[stage])


def _played(
    program: Program, net: str, runners: Mapping[int, StageRunner]
) -> list[PlayedStage]:
    """Return this worker's stages of a net, with the delays of their weights."""
    return [
        PlayedStage(x.module, 0 if x.versions is None else x.versions.delay)
        for stage, x in runners.items()
        if program.stages[stage].net == net
    ]
