"""Make what runs one stage of a program."""

from __future__ import annotations

from hocket.core.program import Program
from hocket.model.stages.stage import StageModule
from hocket.run.engine.lanes.wiring import Wiring
from hocket.run.engine.programs.net_setup import NetSetup, nets_of_batch
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.stage.runner import StageRunner
from hocket.run.stage.saved_forward import StageGradients
from hocket.run.weights.settings import TrainingConfig


def make_runner(
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
    checks_loss: bool = True,
) -> StageRunner:
    """Make the runner of one stage, on this worker's device.

    Args:
        stage: its number in the program.
        module: the stage.
        net: its net.
        program: all nets.
        settings: the precision, and the batches of a step.
        context: this worker's.
        wiring: which values go along each flow.
        seed: for random numbers in the forward.
        recomputes: whether it runs its forward again in the backward.
        checks_loss: whether its first step checks that the loss is a mean over samples,
            if there are several microbatches.
    """
    layout, device = context.layout, context.world.device
    nets = nets_of_batch(program, net.name)
    counts = {x.name: x.num_microbatches for x in program.nets}
    each = sum(counts[name] for name in nets)
    before = sum(counts[name] for name in nets[: nets.index(net.name)])
    num_parts = each * layout.num_replicas * settings.accumulate
    loss = net.loss if module.index == module.num_stages - 1 else None
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
        first_microbatch=layout.replica * each + before,
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
    runner.loss.others = net.others.get(stage, ()) if loss else ()
    return runner
