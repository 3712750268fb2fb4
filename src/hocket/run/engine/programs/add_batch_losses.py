"""Give a player the losses over whole batches, and what gathers their outputs."""

from __future__ import annotations

from collections.abc import Mapping

from hocket.core.program import Program
from hocket.run.cluster.layout import Layout
from hocket.run.engine.lanes.player import Player
from hocket.run.engine.programs.batch_loss import BatchLoss, Gather, LossInput
from hocket.run.engine.programs.net_setup import NetSetup
from hocket.run.engine.programs.reduction_groups import ReductionGroups
from hocket.run.stage.runner import StageRunner


def add_batch_losses(
    player: Player,
    program: Program,
    nets: Mapping[str, NetSetup],
    runners: Mapping[int, StageRunner],
    layout: Layout,
    groups: ReductionGroups,
) -> None:
    """Have a player play ops L and G.

    Args:
        player: this worker's.
        program: the whole.
        nets: by name.
        runners: this device's stages.
        layout: this worker's place.
        groups: the workers that gather outputs.
    """
    for stage, runner in runners.items():
        net = nets[program.stages[stage].net]
        if stage in program.gathered_stages:
            group = groups.reduces(stage)
            assert group is not None, "several replicas"
            own, output = player.maker.own_output(stage), player.maker.gathered(stage)
            player.stages[stage].gather = Gather(net.name, own, output, group)
        if stage in program.loss_stages and net.loss is not None:
            gathers = program.gathers(stage)
            find = player.maker.gathered_of if gathers else player.maker.output_of
            forms = (net.output, *net.others.get(stage, ()))
            inputs = []
            for source, form in zip(program.loss_inputs(stage), forms, strict=True):
                facts = program.stages[source]
                assert form is not None
                trained = program.stages[stage].trainable and facts.trainable
                way = find(source, stage)
                inputs.append(LossInput(facts.net, form, way, trained))
            player.stages[stage].loss = BatchLoss(
                runner,
                inputs,
                player.maker.loss_gradient(stage),
                layout.replica if gathers else None,
            )
