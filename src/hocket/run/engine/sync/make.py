"""Make the gates of one worker, and what is exchanged in each step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch

from hocket.core.program import Program
from hocket.model.stages.cut import StageModule
from hocket.run.cluster.group import WorkerGroup
from hocket.run.comm.all_sum import AllSum
from hocket.run.comm.step_header import ReplicaCheck
from hocket.run.engine.lanes.play_plan import PlayPlan
from hocket.run.engine.programs.net_setup import NetSetup, ParameterNames, stages_of
from hocket.run.engine.sync.gate import Gate
from hocket.run.engine.sync.results import Results
from hocket.run.engine.sync.step_sync import Norms, StepSync
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.stage.precision import LossScale
from hocket.run.stage.runner import StageRunner
from hocket.run.weights.gradients import Gradients
from hocket.run.weights.live_rates import LiveRates
from hocket.run.weights.reduce import Reducer
from hocket.run.weights.settings import TrainingConfig
from hocket.run.weights.tied_weights import Tie
from hocket.run.weights.updater import Updater


@dataclass(frozen=True, slots=True)
class SyncMaker:
    """Makes gates, and what is exchanged in each step.

    Args:
        plan: what is played.
        modules: all stages.
        settings: how to train.
        context: this worker's.
        updaters: this device's, by stage.
        names: names the parameters of all nets.
        stage_of: the stage of each trained parameter, in the uncut model's order.
        ties: the weights that stages on several devices hold.
        tie_sums: the sums of their gradients, by stage of this device.
        scale: the loss scale, where the precision needs one.
        norms: the norms that gates have seen.
    """

    plan: PlayPlan
    modules: Sequence[StageModule]
    settings: TrainingConfig
    context: WorkerContext
    updaters: dict[int, Updater]
    names: ParameterNames
    stage_of: dict[str, int]
    ties: Sequence[Tie]
    tie_sums: Mapping[int, Sequence[Reducer]]
    scale: LossScale | None
    norms: Norms = field(default_factory=Norms)

    def make(
        self,
        runners: Mapping[int, StageRunner],
        ends: Mapping[int, str],
        results: Mapping[str, Results],
        replicas: WorkerGroup | None,
    ) -> StepSync:
        """Make what is exchanged in each step. Every worker must call this."""
        gates, gate_of = self._gates()
        everyone = None
        if self.plan.overlaps:
            sums = self.context.with_everyone()
            everyone = self._gradients(sums, self._counted(), self.updaters)
        return StepSync(
            runners,
            ends,
            results,
            None
            if replicas is None
            else ReplicaCheck(replicas, self._rates(self.updaters)),
            gates,
            gate_of,
            everyone,
            self.norms,
        )

    def _gates(self) -> tuple[list[Gate], dict[int, Gate]]:
        """Return this worker's gates, and the gate of each of its trained stages."""
        clips = self.settings.clip_norm is not None
        groups, stages = self.plan.gates, self.plan.program.stages
        waits = clips or self.plan.flushes
        gates: list[Gate] = []
        gate_of: dict[int, Gate] = {}
        for number, group in enumerate(groups):
            own = [n for n in group if stages[n].device == self.context.layout.device]
            gate = self._gate(number, group, own, waits=waits)
            if gate is not None:
                gates.append(gate)
                gate_of |= dict.fromkeys(own, gate)
        return gates, gate_of

    def _gate(
        self, number: int, group: Sequence[int], own: Sequence[int], *, waits: bool
    ) -> Gate | None:
        """Make this worker's part; None where it has none. Every worker must call."""
        layout, stages = self.context.layout, self.plan.program.stages
        devices = sorted({stages[n].device for n in group})
        if not self.plan.overlaps:
            devices = list(range(layout.num_devices))  # errors are raised on all
        sums = None
        if waits and (len(devices) > 1 or not self.plan.overlaps):
            sums = self.context.with_devices(devices, f"norms of gate {number}")
        if layout.device not in devices:
            return None
        counts = layout.pipeline < layout.num_shards  # the first replica
        counted = self._counted() if counts or sums is None else set()
        return Gate(
            own,
            self._gradients(sums, counted, own, group),
            self.updaters,
            self.tie_sums,
            self.stage_of,
            waits=waits,
            counts=counts,
            clip_norm=self.settings.clip_norm,
            scale=self.scale,
            on_norms=self.norms.add if self.plan.overlaps else _ignore,
            # A stream of CUDA may still run what another lane's gradients need.
            may_post_early=self.context.lanes is None
            or self.context.world.device.type == "cpu",
            may_mask=self._may_mask(),
        )

    def _may_mask(self) -> bool:
        """Whether a device may leave out updates: one stream, and no other worker.

        The weights of nets that follow others would have to be left as they are, too.
        """
        world, program = self.context.world, self.plan.program
        return (
            world.world_size == 1
            and world.device.type != "cpu"
            and self.context.lanes is None
            and self.scale is None
            and not any(stage.follows for stage in program.stages)
        )

    def _counted(self) -> set[str]:
        """Name the weights whose norms this device posts; each is counted once."""
        own = self.context.layout.device
        elsewhere = {tie.name for tie in self.ties if tie.devices[0] != own}
        stages = self.plan.program.stages
        # Of stages that are copies, the first one's gradients count.
        here = {
            name
            for name, stage in self.stage_of.items()
            if stages[stage].device == own or not self.plan.program.copies
        }
        return here - elsewhere

    def _names_of(self, group: Collection[int]) -> set[str]:
        return {name for name, stage in self.stage_of.items() if stage in group}

    def _gradients(
        self,
        sums: AllSum | None,
        counted: Collection[str],
        stages: Iterable[int],
        group: Collection[int] | None = None,
    ) -> Gradients:
        """Make this worker's part of the gradients of a gate's stages, or of all."""
        layout = self.context.layout
        is_first = not (layout.pipeline or layout.tp_rank)
        held = {
            self.names.of(stage, name): parameter
            for stage in stages
            for name, parameter in self.updaters[stage].parameters.items()
            if parameter.requires_grad
        }
        types = {
            parameter.dtype
            for module in self.modules
            for parameter in module.parameters()
            if parameter.requires_grad
        }
        return Gradients(
            tuple(self.stage_of),
            held,
            frozenset(held).intersection(counted),
            sums,
            device=self.context.world.device,
            dtype=reduce(torch.promote_types, types or {torch.float32}),
            members=None if group is None else self._names_of(group),
            rates=self._rates(stages if sums is None or is_first else ()),
            is_alone=self.context.world.world_size == 1,
            num_parts=layout.num_shards * layout.tp_size,
            part=layout.shard * layout.tp_size + layout.tp_rank,
        )

    def _rates(self, stages: Iterable[int]) -> LiveRates:
        layout, all_stages = self.context.layout, self.plan.program.stages
        return LiveRates(
            {stage: self.updaters[stage] for stage in stages},
            [self.names.net_of(stage) for stage in range(len(all_stages))],
            [layout.ranks_of(stage.device)[0] for stage in all_stages],
        )


def _ignore(step: int, norms: torch.Tensor) -> None:
    """Keep nothing: one gate knows the norms of all gradients."""


def first_stages(
    program: Program, nets: Sequence[NetSetup], names: ParameterNames
) -> dict[str, int]:
    """Return the first stage of each trained parameter, in the models' order.

    Stages that were frozen while training ran have none.
    """
    found: dict[str, int] = {}
    for net in nets:
        if net.settings is None or not names.is_first(net.name):
            continue
        stages: dict[str, int] = {}
        numbers = stages_of(program, net.name)
        trained = [
            (number, module)
            for number, module in zip(numbers, net.modules, strict=True)
            if program.stages[number].trainable
        ]
        for number, module in trained:
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    stages.setdefault(name, number)
        for name in net.parameter_names:
            if name in stages:
                found[names.of(stages[name], name)] = stages[name]
    return found
