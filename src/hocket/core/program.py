"""Define what must be computed: the nets, their stages, and the flows between them.

    nets      model                  or   teacher ──┐  (a flow from net to net)
    stages    0 ──▶ 1 ──▶ 2 ──▶ 3         0 ──▶ 1   ▼
    device    0     1     0     1         student   2 ──▶ 3

Stages are numbered over the whole program. A program says nothing about order: that
is the schedule's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hocket.core.checker.program_faults import program_faults
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

    def __post_init__(self) -> None:
        """Refuse facts that contradict each other."""
        if faults := program_faults(self):
            raise PlanError("this program is not possible:\n  " + "\n  ".join(faults))

    def __hash__(self) -> int:
        """Hash the facts, once: rules are looked up by program very often."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        sizes = self.num_steps, self.num_replicas
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
        return cls(nets, stages, flows, num_steps, num_replicas)

    @property
    def num_stages(self) -> int:
        """How many stages there are in one replica."""
        return len(self.stages)

    @cached_property
    def num_devices(self) -> int:
        """How many devices one replica uses."""
        return 1 + max(stage.device for stage in self.stages)

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
        return self.num_replicas * len(self.copies_of[stage])

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
        return self.net_of(stage).loss_over_replicas and self.num_replicas > 1

    @cached_property
    def gathered_stages(self) -> frozenset[int]:
        """The stages whose outputs are gathered over replicas."""
        read_by_losses = (
            read
            for stage in self.loss_stages
            if self.gathers(stage)
            for read in self.loss_inputs(stage)
        )
        flows = self.whole_batch_flows if self.num_replicas > 1 else ()
        return frozenset((*read_by_losses, *(source for source, _ in flows)))

    def reads_gathered(self, source: int, target: int) -> bool:
        """Return whether a stage or its loss reads gathered outputs of another one."""
        if (source, target) in self.whole_batch_flows:
            return self.num_replicas > 1
        return self.gathers(target) and source in self.loss_inputs(target)


def _grouped(
    pairs: Iterable[tuple[int, int]], size: int
) -> tuple[tuple[int, ...], ...]:
    """Return, for each number below `size`, the numbers that are paired with it."""
    groups: list[list[int]] = [[] for _ in range(size)]
    for key, number in pairs:
        groups[key].append(number)
    return tuple(map(tuple, groups))
