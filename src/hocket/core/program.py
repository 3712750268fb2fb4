"""Define what must be computed: the nets, their stages, and the flows between them.

    nets      model                  or   teacher ──┐  (a flow from net to net)
    stages    0 ──▶ 1 ──▶ 2 ──▶ 3         0 ──▶ 1   ▼
    device    0     1     0     1         student   2 ──▶ 3

Stages are numbered over the whole program. A program says nothing about order: that
is the schedule's part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from hocket.errors import PlanError


@dataclass(frozen=True, slots=True)
class Net:
    """One model of the program.

    Args:
        name: `model`, or `student` and `teacher`, or one name per job: letters,
            digits and `_.-`.
        num_microbatches: the parts that one step's batch is cut into.
        batch_loss: the loss is over the whole batch (op L) and not part of the
            last forward of each microbatch.
        loss_over_replicas: the whole-batch loss is over the outputs of all replicas:
            each gathers them (op G) and keeps the gradient of its own rows. Means
            nothing with one replica.
    """

    name: str
    num_microbatches: int
    batch_loss: bool = False
    loss_over_replicas: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """A contiguous part of one net, on one device.

    Args:
        net: the name of the net it is a part of.
        device: where it lives, numbered within one replica of the program, from 0
            and without gaps.
        trainable: it has backwards, and updates by an optimizer.
        delay: forward and backward of step `t` read the weights after
            `max(0, t - delay)` updates.
        follows: the trainable stages whose weights this one tracks (a momentum
            teacher); such a stage has no backward, but is updated.
    """

    net: str
    device: int
    trainable: bool = True
    delay: int = 0
    follows: tuple[int, ...] = ()

    @property
    def moves(self) -> bool:
        """Whether its weights change at all."""
        return self.trainable or bool(self.follows)


@dataclass(frozen=True)
class Program:
    """What must be computed, and what needs what.

    Args:
        nets: each model, with its number of microbatches per step.
        stages: numbered over the whole program, in an order in which values flow.
        flows: `(from_stage, to_stage)`, each from a lower to a higher number.
        num_steps: updates of every stage, numbered from 0.
        num_replicas: copies of the whole pipeline, on other devices, that train on
            other parts of the batch.
        copies: groups of stages that are copies of one another: the same part of the
            same model, on different devices, trained on other microbatches. Their
            gradients are summed (op R), as over replicas.
        whole_batch_flows: those flows, from stages that are not trainable, of which
            each microbatch of the target reads the outputs of the whole batch: the loss
            of each sample is over the teacher's outputs of all samples, gathered over
            replicas (op G). Of any other
            flow a microbatch reads its own samples: several microbatches of a net with
            finer ones, a part of one of a net with coarser ones.
        num_shards: the devices that hold each stage of a replica together: each keeps
            a part of every weight, and trains on a part of the replica's samples. Ops
            UNSHARD and RESHARD say when it has all of the weights.

    Raises:
        PlanError: the facts contradict each other; the message lists all that do.
    """

    nets: tuple[Net, ...]
    stages: tuple[Stage, ...]
    flows: tuple[tuple[int, int], ...]
    num_steps: int = 1
    num_replicas: int = 1
    copies: tuple[tuple[int, ...], ...] = ()
    whole_batch_flows: frozenset[tuple[int, int]] = frozenset()
    num_shards: int = 1

    def __post_init__(self) -> None:
        """Refuse facts that contradict each other."""
        if faults := program_faults(self):
            raise PlanError("this program is not possible:\n  " + "\n  ".join(faults))

    def __hash__(self) -> int:
        """Hash the facts, once: rules are looked up by program very often."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        sizes = self.num_steps, self.num_replicas, self.num_shards
        flows = self.flows, self.whole_batch_flows
        return hash((self.nets, self.stages, flows, sizes, self.copies))

    @classmethod
    def chain(
        cls,
        devices: Sequence[int],
        num_microbatches: int,
        *,
        num_steps: int = 1,
        num_replicas: int = 1,
        num_shards: int = 1,
        trainable: bool = True,
        batch_loss: bool = False,
        loss_over_replicas: bool = False,
        delays: Sequence[int] | None = None,
    ) -> Program:
        """Make one net whose stages follow each other, the usual case.

        Args:
            devices: the device of each stage.
            num_microbatches: per step.
            num_steps: updates of every stage.
            num_replicas: copies of the whole pipeline.
            num_shards: the devices that hold each stage of a replica together.
            trainable: False for evaluation.
            batch_loss: the loss is over the whole batch.
            loss_over_replicas: it is over the batches of all replicas.
            delays: the delay of each stage; all 0 when not given.

        Raises:
            PlanError: there are not as many delays as stages, or the program is not
                possible.
        """
        delays = [0] * len(devices) if delays is None else delays
        if len(delays) != len(devices):
            raise PlanError(
                f"{len(delays)} delays do not fit {len(devices)} stages: give one each"
            )
        stages = tuple(
            Stage("model", device, trainable, delay)
            for device, delay in zip(devices, delays, strict=True)
        )
        flows = tuple((s, s + 1) for s in range(len(stages) - 1))
        nets = (Net("model", num_microbatches, batch_loss, loss_over_replicas),)
        return cls(nets, stages, flows, num_steps, num_replicas, num_shards=num_shards)

    @property
    def num_stages(self) -> int:
        """How many stages there are in one replica."""
        return len(self.stages)

    @property
    def num_pipelines(self) -> int:
        """How many devices train each stage, on other parts of the batch each."""
        return self.num_replicas * self.num_shards

    @cached_property
    def num_devices(self) -> int:
        """How many devices one replica uses."""
        return 1 + max(stage.device for stage in self.stages)

    @cached_property
    def trained_stages(self) -> tuple[int, ...]:
        """The numbers of the stages that are trainable."""
        return tuple(n for n, stage in enumerate(self.stages) if stage.trainable)

    @cached_property
    def _nets(self) -> dict[str, Net]:
        return {net.name: net for net in self.nets}

    def net_of(self, stage: int) -> Net:
        """Return the net that a stage is a part of."""
        return self._nets[self.stages[stage].net]

    def num_microbatches_of(self, stage: int) -> int:
        """Return how many microbatches a stage sees in one step."""
        return self.net_of(stage).num_microbatches

    @cached_property
    def stages_on(self) -> tuple[tuple[int, ...], ...]:
        """The stages on each device, in order of number."""
        on = ((stage.device, number) for number, stage in enumerate(self.stages))
        return _grouped(on, self.num_devices)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages whose output it reads."""
        return _grouped(((b, a) for a, b in self.flows), self.num_stages)

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages that read its output."""
        return _grouped(self.flows, self.num_stages)

    @cached_property
    def gradient_targets(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages that send it a gradient of its output."""
        return tuple(
            tuple(t for t in targets if stage.trainable and self.stages[t].trainable)
            for stage, targets in zip(self.stages, self.targets, strict=True)
        )

    @cached_property
    def copies_of(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, all copies of it, itself among them."""
        groups = {stage: group for group in self.copies for stage in group}
        return tuple(groups.get(stage, (stage,)) for stage in range(self.num_stages))

    @cached_property
    def reduced_stages(self) -> frozenset[int]:
        """The stages whose gradients are summed over replicas or copies."""
        return frozenset(
            number
            for number, stage in enumerate(self.stages)
            if stage.trainable and self.num_members(number) > 1
        )

    def num_members(self, stage: int) -> int:
        """Return how many stages sum their gradients with this one, which included."""
        return self.num_pipelines * len(self.copies_of[stage])

    @cached_property
    def loss_stages(self) -> frozenset[int]:
        """The stages whose outputs a whole-batch loss reads, and sends gradients to.

        These are the ends of a net with `batch_loss`. In evaluation, where no stage
        is trainable, the loss is computed too, and no op reads its gradient.
        """
        return frozenset(
            number
            for number, stage in enumerate(self.stages)
            if self._nets[stage.net].batch_loss
            and not (self.gradient_targets if stage.trainable else self.targets)[number]
        )

    def loss_inputs(self, stage: int) -> tuple[int, ...]:
        """Return the stages whose outputs the whole-batch loss of a stage reads.

        These are the stage itself, and those of other nets that flow into it.
        """
        net = self.stages[stage].net
        others = [s for s in self.sources[stage] if self.stages[s].net != net]
        return (stage, *others) if stage in self.loss_stages else ()

    def gathers(self, stage: int) -> bool:
        """Return whether a stage's whole-batch loss is over the outputs of replicas."""
        return self.net_of(stage).loss_over_replicas and self.num_pipelines > 1

    @cached_property
    def gathered_stages(self) -> frozenset[int]:
        """The stages whose outputs are gathered over replicas."""
        read_by_losses = (
            read
            for stage in self.loss_stages
            if self.gathers(stage)
            for read in self.loss_inputs(stage)
        )
        flows = self.whole_batch_flows if self.num_pipelines > 1 else ()
        return frozenset((*read_by_losses, *(source for source, _ in flows)))

    def reads_gathered(self, source: int, target: int) -> bool:
        """Return whether a stage or its loss reads gathered outputs of another one."""
        if (source, target) in self.whole_batch_flows:
            return self.num_pipelines > 1
        return self.gathers(target) and source in self.loss_inputs(target)


def _grouped(
    pairs: Iterable[tuple[int, int]], size: int
) -> tuple[tuple[int, ...], ...]:
    """Return, for each number below `size`, the numbers that are paired with it."""
    groups: list[list[int]] = [[] for _ in range(size)]
    for key, number in pairs:
        groups[key].append(number)
    return tuple(map(tuple, groups))


# Find the facts of a program that contradict each other.

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


def program_faults(program: Program) -> list[str]:
    """Return one sentence per contradiction; none if the program is possible."""
    faults = [*_number_faults(program), *_stage_faults(program), *_flow_faults(program)]
    return faults or _copy_faults(program)


def _number_faults(program: Program) -> list[str]:
    faults = []
    if not program.nets or not program.stages:
        faults.append("it needs at least one net and one stage")
    for name, number in (
        ("num_steps", program.num_steps),
        ("num_replicas", program.num_replicas),
        ("num_shards", program.num_shards),
        *((f"num_microbatches of {n.name}", n.num_microbatches) for n in program.nets),
    ):
        if number < 1:
            faults.append(f"{name} is {number}, and must be at least 1")
    faults += [
        f"net {net.name} has a loss over replicas, but none over the whole batch: set "
        "batch_loss=True (loss=replicas in text), or loss_over_replicas=False"
        for net in program.nets
        if net.loss_over_replicas and not net.batch_loss
    ]
    names = [net.name for net in program.nets]
    if len(set(names)) != len(names):
        faults.append(f"two nets share a name: {', '.join(names)}")
    faults += [
        f"a net is named {name!r}: use letters, digits and _.- alone"
        for name in names
        if not _NAME.fullmatch(name)
    ]
    return faults


def _stage_faults(program: Program) -> list[str]:
    faults = []
    names = {net.name for net in program.nets}
    for number, stage in enumerate(program.stages):
        where = f"stage {number}"
        if stage.net not in names:
            faults.append(f"{where} is part of net {stage.net!r}, which is not listed")
        if stage.device < 0 or stage.delay < 0:
            faults.append(f"{where} has a negative device or delay")
        faults += _follow_faults(program, number)
    devices = {stage.device for stage in program.stages}
    gaps = sorted(set(range(len(devices))) - devices)
    if gaps:
        faults.append(
            f"no stage is on device {gaps[0]}, but one on device {max(devices)}: "
            "number the devices from 0 without gaps"
        )
    return faults


def _follow_faults(program: Program, number: int) -> Iterator[str]:
    stage = program.stages[number]
    for other in stage.follows:
        where = f"stage {number} follows stage {other}"
        if not 0 <= other < len(program.stages):
            yield f"{where}, which does not exist"
        elif stage.trainable or not program.stages[other].trainable:
            yield (
                f"{where}: only a stage that is not trainable may follow, and only "
                "one that is"
            )
        elif program.stages[other].device != stage.device:
            yield (
                f"{where}, but they are on devices {stage.device} and "
                f"{program.stages[other].device}: put both on one device"
            )


def _copy_faults(program: Program) -> list[str]:
    listed = [stage for group in program.copies for stage in group]
    faults = [
        f"stage {stage} is listed as a copy, but does not exist"
        for stage in sorted(set(listed).difference(range(program.num_stages)))
    ]
    faults += [
        f"stage {stage} is listed as a copy more than once"
        for stage in sorted(set(listed))
        if listed.count(stage) > 1
    ]
    if faults:
        return faults
    return [
        f"copies {' '.join(map(str, group))}: {rule}"
        for group in program.copies
        for rule in _rules_broken(program, group)
    ]


def _rules_broken(program: Program, group: tuple[int, ...]) -> Iterator[str]:
    stages = [program.stages[stage] for stage in group]
    if len(group) == 1:
        yield "a group has at least two stages"
    if len({stage.device for stage in stages}) < len(group):
        yield "put each on a device of its own"
    if not all(stage.trainable for stage in stages):
        yield "all must be trainable, since their gradients are summed"
    if len({stage.delay for stage in stages}) > 1:
        yield "give all the same delay, since the sum is of gradients at equal weights"
    if len({_place_in_net(program, stage) for stage in group}) > 1:
        yield "each must be the same part of a net with equally many stages"


def _place_in_net(program: Program, number: int) -> tuple[int, int]:
    """Return a stage's place in its net, and the net's number of stages."""
    net = program.stages[number].net
    own = [s for s, stage in enumerate(program.stages) if stage.net == net]
    return own.index(number), len(own)


def _flow_faults(program: Program) -> list[str]:
    faults = []
    seen = set()
    for flow in program.flows:
        from_stage, to_stage = flow
        if not 0 <= from_stage < to_stage < len(program.stages):
            faults.append(
                f"flow {from_stage} -> {to_stage} must go from a lower to a higher "
                f"stage number, both below {len(program.stages)}"
            )
        elif flow in seen:
            faults.append(f"flow {from_stage} -> {to_stage} is listed twice")
        seen.add(flow)
    faults += (
        f"flow {a} -> {b} is to read the whole batch, but is not listed as a flow"
        for a, b in sorted(program.whole_batch_flows.difference(program.flows))
    )
    names = {net.name for net in program.nets}
    if faults or any(stage.net not in names for stage in program.stages):
        return faults
    return list(_net_flow_faults(program))


def _net_flow_faults(program: Program) -> Iterator[str]:
    for from_stage, to_stage in program.flows:
        source, target = program.stages[from_stage], program.stages[to_stage]
        num_from = program.num_microbatches_of(from_stage)
        num_to = program.num_microbatches_of(to_stage)
        if source.trainable and not target.trainable:
            yield (
                f"flow {from_stage} -> {to_stage} leads from a trainable stage to one "
                "that is not, which would lose the gradient: make both trainable"
            )
        reads_batch = (from_stage, to_stage) in program.whole_batch_flows
        if reads_batch and (source.trainable or to_stage in program.loss_stages):
            yield (
                f"flow {from_stage} -> {to_stage} is to read the whole batch: let it "
                "begin at a stage that is not trainable, and end at one without a loss "
                "over the whole batch (op L), which reads that anyway"
            )
        is_multiple = max(num_from, num_to) % max(1, min(num_from, num_to)) == 0
        fits = num_from == num_to or (is_multiple and not source.trainable)
        if not fits and not reads_batch and to_stage not in program.loss_stages:
            yield (
                f"flow {from_stage} -> {to_stage} leads from net {source.net} with "
                f"{num_from} microbatches to net {target.net} with {num_to}: use equal "
                "numbers, a multiple of the other for a net without backwards, a flow "
                "that reads the whole batch, or a loss over the whole batch (op L)"
            )
