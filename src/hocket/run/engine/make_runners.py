"""Make what runs the stages of a program on one device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from hocket.core.program import Program
from hocket.model.stages.stage import StageModule
from hocket.run.engine.lanes.wiring import Wiring
from hocket.run.engine.programs.net_setup import NetSetup, modules_of, nets_of_batch
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.stage.loss_checks.reads import LossReads, PlayedStage
from hocket.run.stage.runner import StageRunner
from hocket.run.stage.saved_forward import StageGradients
from hocket.run.weights.settings import TrainingConfig


def make_runners(
    program: Program,
    nets: Sequence[NetSetup],
    settings: TrainingConfig,
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
        settings: the precision, and the batches of a step.
        context: this worker's.
        wiring: which values go along each flow.
        seed: for random numbers.
        recomputes: the stages that run their forward again in the backward.
        checks_loss: whether the first step checks that each loss is a mean over
            samples, if there are several microbatches.
    """
    modules, by_net = modules_of(program, nets), {net.name: net for net in nets}
    runners = {
        stage: _runner(
            stage,
            modules[stage],
            by_net[program.stages[stage].net],
            program,
            settings,
            context,
            wiring,
            seed=seed,
            recomputes=stage in recomputes,
            checks_loss=checks_loss,
        )
        for stage in program.stages_on[context.layout.device]
    }
    for stage, runner in runners.items():
        net = by_net[program.stages[stage].net]
        if net.loss and net.tensors and runner.module.is_last:
            played = partial(_played, program, net.name, runners)
            runner.loss.reads = LossReads(net.loss, net.tensors, played)
    return runners


def _played(
    program: Program, net: str, runners: Mapping[int, StageRunner]
) -> list[PlayedStage]:
    """Return this worker's stages of a net, with the delays of their weights."""
    return [
        PlayedStage(x.module, 0 if x.versions is None else x.versions.delay)
        for stage, x in runners.items()
        if program.stages[stage].net == net
    ]


def _runner(
    stage: int,
    module: StageModule,
    net: NetSetup,
    program: Program,
    settings: TrainingConfig,
    context: WorkerContext,
    wiring: Wiring,
    *,
    seed: int,
    recomputes: bool,
    checks_loss: bool,
) -> StageRunner:
    layout, device = context.layout, context.world.device
    nets = nets_of_batch(program, net.name)
    counts = {x.name: x.num_microbatches for x in program.nets}
    each = sum(counts[name] for name in nets)
    before = sum(counts[name] for name in nets[: nets.index(net.name)])
    num_parts = each * layout.num_pipelines * settings.accumulate
    loss = net.loss if module.is_last else None
    is_whole = program.net_of(stage).batch_loss
    gradients = None
    if stage in wiring.takes_grad:
        takes = wiring.takes_grad[stage]
        takes = takes[: len(module.inputs)] if stage in program.loss_stages else takes
        gradients = StageGradients(takes, wiring.gives_grad[stage])
    runner = StageRunner(
        stage,
        module.to(device),
        None if is_whole else loss,
        device=device,
        seed=seed,
        net=net.seed_name,
        first_microbatch=layout.pipeline * each + before,
        precision=settings.compute_precision,
        recomputes=recomputes,
        checks_loss=checks_loss and num_parts > 1,
        trainable=program.stages[stage].trainable,
        training=net.training and module.index >= net.num_frozen,
        gradients=gradients,
        others=() if stage in program.loss_stages else net.others.get(stage, ()),
        saved_prefix=net.saved_prefix,
    )
    runner.loss.batch_function = loss if is_whole else None
    # Not a part of it; and not a copy, as of batches that are read ahead.
    runner.loss.owns_batch = not checks_loss or num_parts == program.num_steps == 1
    runner.loss.others = net.others.get(stage, ()) if loss else ()
    return runner
