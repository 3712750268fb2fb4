"""Makes a stage's inputs and outputs.

    from another device ──▶ │       │ ──▶ to another device
                            │ stage │
    from a stage here   ──▶ │       │ ──▶ to a stage here

Which of them it is follows from the program and does not change from step to step, so
it is looked up once. The other way round, gradients take the same ways back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from hocket.core.dataflow import Fact, need_rules
from hocket.core.op import Kind
from hocket.core.program import Program
from hocket.run.engine.lanes.inputs import (
    FarInput,
    Input,
    Key,
    NearInput,
    PartInput,
    RegroupedInput,
    Values,
)
from hocket.run.engine.lanes.outputs import Output, Way
from hocket.run.engine.lanes.point_to_point import PointToPoint
from hocket.run.engine.lanes.wiring import Places, Wiring
from hocket.run.engine.worker_context import WorkerContext

OP_G: Final = -1  # in the place of a stage that reads outputs
# Values between stages of one device, by fact, stage that makes and stage that reads.
Near: TypeAlias = dict[tuple[Fact, int, int], dict[Key, Values]]


@dataclass(eq=False)
class InputMaker:
    """Makes the inputs and outputs of one device's stages.

    Args:
        program: says which stages follow each other, and where they live.
        wiring: which values go along each flow.
        channels: this worker's messages.
        context: this worker's; its recorder notes that waits are over.
    """

    program: Program
    wiring: Wiring
    channels: PointToPoint
    context: WorkerContext

    def __post_init__(self) -> None:
        """Begin without inputs."""
        self._device = self.context.layout.device
        self._near: Near = {}
        self._far: dict[tuple[Fact, int], FarInput] = {}

    def input_of(self, source: int, stage: int) -> Input:
        """Return where a stage's forward finds the outputs of another one."""
        program = self.program
        takes_all = (source, stage) in program.whole_batch_flows
        rule = next(
            rule
            for rule in need_rules(Kind.FORWARD, stage, program)
            if rule.stage == source and rule.fact in {Fact.OUTPUT, Fact.GATHERED}
        )
        found = self.made(rule.fact, source, stage)
        if rule.fact is Fact.GATHERED:  # one per step, which all microbatches read
            rule = replace(rule, num_readers=program.num_microbatches_of(stage))
        if not takes_all and rule.num_read == rule.num_readers == 1:
            return found
        return RegroupedInput(
            found,
            rule,
            program.stages[stage].net,
            takes_all=takes_all,
            joins_once=self.context.lanes is None,
        )

    def loss_gradient(self, stage: int) -> dict[Key, Values]:
        """Return where the loss over a whole batch leaves gradients for a stage."""
        return self._near.setdefault((Fact.LOSS_GRAD, stage, stage), {})

    def output(self, stage: int, *, copies: bool) -> Output:
        """Return where a stage's outputs go."""
        program = self.program
        readers = [*self._readers(Fact.OUTPUT, stage)]
        if stage in program.loss_stages and not program.gathers(stage):
            readers.append(stage)
        if stage in program.gathered_stages:
            readers.append(OP_G)
        return self._output(Fact.OUTPUT, stage, readers, copies=copies)

    def gathered(self, stage: int) -> Output:
        """Return where a stage's gathered outputs go."""
        read = (*self.program.targets[stage], stage)
        readers = [x for x in sorted({*read}) if self.program.reads_gathered(stage, x)]
        return self._output(Fact.GATHERED, stage, readers, copies=False)

    def gradient(self, stage: int) -> Output:
        """Return where the gradients of a stage's inputs go."""
        sources = self._readers(Fact.INPUT_GRAD, stage)
        return self._output(Fact.INPUT_GRAD, stage, sources, copies=True)

    def _readers(self, fact: Fact, maker: int) -> Sequence[int]:
        program = self.program
        if fact is Fact.INPUT_GRAD:
            return [s for s in program.sources[maker] if program.stages[s].trainable]
        gathered = fact is Fact.GATHERED
        return [
            target
            for target in program.targets[maker]
            if program.reads_gathered(maker, target) is gathered
        ]

    def _places(self, fact: Fact, maker: int, readers: Sequence[int]) -> Places | None:
        if fact is Fact.GATHERED or readers[0] in (maker, OP_G):
            return None
        if fact is Fact.INPUT_GRAD:
            return self.wiring.returned(maker, readers)
        return self.wiring.sent(maker, readers)

    def made(self, fact: Fact, maker: int, reader: int) -> Input:
        """Return where a stage, or op G (`OP_G`), finds what another stage made."""
        program, net = self.program, self.program.stages[maker].net
        if program.stages[maker].device == self._device:
            near = self._near.setdefault((fact, maker, reader), {})
            return NearInput(near, net, self.context.lanes)
        readers = [
            other
            for other in self._readers(fact, maker)
            if program.stages[other].device == self._device
        ]
        if (fact, maker) not in self._far:
            counts = [self._count(fact, maker, other) for other in readers]
            channel = self.channels.incoming(fact, maker)
            recorder = self.context.recorder
            self._far[fact, maker] = FarInput(channel, net, counts, recorder)
        whole = self._far[fact, maker]
        sent = self._places(fact, maker, readers)
        own = self._places(fact, maker, [reader])
        if sent is None or own is None or sent == own:
            return whole
        return PartInput(whole, tuple(sent.index(place) for place in own))

    def _count(self, fact: Fact, maker: int, reader: int) -> int:
        """Return for how many of the maker's microbatches a stage reads the values."""
        if fact is Fact.GATHERED:
            return 1
        own = self.program.num_microbatches_of(maker)
        if fact is Fact.OUTPUT:
            return own
        return min(own, self.program.num_microbatches_of(reader))

    def _output(
        self, fact: Fact, maker: int, readers: Sequence[int], *, copies: bool
    ) -> Output:
        by_device: dict[int, list[int]] = {}
        for reader in readers:
            own = self._device if reader == OP_G else None
            device = self.program.stages[reader].device if own is None else own
            by_device.setdefault(device, []).append(reader)
        far = [
            Way(
                self.channels.outgoing((fact, maker, device)),
                self._places(fact, maker, stages),
                max(self._count(fact, maker, stage) for stage in stages),
            )
            for device, stages in by_device.items()
            if device != self._device
        ]
        near = [
            Way(
                self._near.setdefault((fact, maker, reader), {}),
                self._places(fact, maker, [reader]),
                self._count(fact, maker, reader),
            )
            for reader in by_device.get(self._device, ())
        ]
        net = self.program.stages[maker].net
        return Output(net, far, near, copies=copies)
