"""Prove that sharded stages are whole where their weights are read, and nowhere else.

    d0  0UNSHARD0 0F0 0F1 0RESHARD0 ... 0UNSHARD1 0B0 0B1 0RESHARD1 0R 0U
        ├───────── whole ─────────┤     ├────────── whole ────────┤

In the order of its lane, of each stage:

- an op that reads weights (F, B, I, W, L) stands while the stage is whole, by a gather
  of its own step;
- no UNSHARD of a stage that is whole, no RESHARD of one that is sharded; both of a pair
  have one number, which counts the stage's gathers of the step from 0;
- between them, an op reads the weights;
- an UNSHARD stands behind as many updates as its step reads: a device has one version
  of its shard;
- no update of a stage that is whole, and none is whole when a step ends, nor where the
  runtime may stop: before a body, and behind each of its repetitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from hocket.core.checker.faults import Fault
from hocket.core.dataflow import version_read
from hocket.core.op import READS_WEIGHTS, SHARDING, Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule

_IN_ONE_LANE = READS_WEIGHTS | SHARDING | {Kind.UPDATE}
_PASS = "hocket.passes.add_gathers places them all"


def gather_faults(schedule: Schedule) -> Iterator[Fault]:
    """Find ops at which a sharded stage is not as they need it.

    Args:
        schedule: any schedule; nothing about it is assumed.
    """
    if schedule.program.num_shards == 1:
        yield from _of_no_shards(schedule)
        return
    yield from _divided_stages(schedule)
    for number, lane in enumerate(schedule.lanes):
        stops = frozenset(schedule.repetitions(number))
        walk = _Lane(schedule.program, lane, stops, has_body=bool(schedule.body))
        yield from walk.faults()


def _of_no_shards(schedule: Schedule) -> Iterator[Fault]:
    for lane in schedule.lanes:
        for op in lane.ops:
            if op.kind in SHARDING:
                yield (
                    f"{op} on device {lane.device} is for sharded stages, but "
                    "num_shards is 1: leave it out, or set num_shards (in text a line "
                    '"shards 2")',
                    op,
                )


def _divided_stages(schedule: Schedule) -> Iterator[Fault]:
    """Find stages whose weights are gathered, read and updated in several lanes."""
    home: dict[int, Lane] = {}
    found: set[int] = set()
    for lane in schedule.lanes:
        for op in lane.ops:
            if op.kind not in _IN_ONE_LANE or op.stage in found:
                continue
            first = home.setdefault(op.stage, lane)
            if first is not lane:
                found.add(op.stage)
                yield (
                    f"{op} on lane {lane.label} is of stage {op.stage}, which is "
                    f"sharded and has ops on lane {first.label}: put its UNSHARD, "
                    "RESHARD, U, and all that reads its weights in one lane",
                    op,
                )


@dataclass
class _Lane:
    """A lane's sharded stages, from op to op.

    Args:
        program: the program.
        lane: the lane.
        stops: where no stage may be whole.
        has_body: whether ops of several steps may stand between one another.
        whole: the stages that are whole, by which UNSHARD.
        num_readers: the ops that have read those of each.
        num_gathers: the gathers so far, by stage and step.
        num_updates: the updates so far, by stage.
        named: stages of which a reader without gather has been named, and gathers
            without end.
    """

    program: Program
    lane: Lane
    stops: frozenset[int]
    has_body: bool
    whole: dict[int, Op] = field(default_factory=dict)
    num_readers: Counter[int] = field(default_factory=Counter)
    num_gathers: Counter[tuple[int, int]] = field(default_factory=Counter)
    num_updates: Counter[int] = field(default_factory=Counter)
    named: set[int | Op] = field(default_factory=set)

    def faults(self) -> Iterator[Fault]:
        """Walk along the lane, and yield what is wrong."""
        for position, op in enumerate(self.lane.ops):
            if position in self.stops:
                yield from self._refuse_whole("a repetition of the body begins or ends")
            elif not self.has_body:
                yield from self._refuse_whole(f"{op} of another step comes", op.step)
            if op.stage < self.program.num_stages:  # else reported as no op of it
                yield from self._at(op)
        yield from self._refuse_whole("the lane ends")

    def _at(self, op: Op) -> Iterator[Fault]:
        if op.kind is Kind.UNSHARD:
            yield from self._unshard(op)
        elif op.kind is Kind.RESHARD:
            yield from self._reshard(op)
        elif op.kind in READS_WEIGHTS:
            yield from self._read(op)
        elif op.kind is Kind.UPDATE:
            yield from self._update(op)

    def _unshard(self, op: Op) -> Iterator[Fault]:
        where, stage = self._where(op), op.stage
        before = self.whole.get(stage)
        if before is not None:
            reshard = before.as_kind(Kind.RESHARD)
            yield (
                f"{where} gathers stage {stage}, which is whole by {before}: put "
                f"{reshard} between them, or leave {op} out",
                op,
            )
        yield from self._number(op)
        reads = version_read(stage, op.step, self.program)
        seen = self.num_updates[stage]
        if self.program.stages[stage].moves and seen != reads:
            least = f"behind {Op(Kind.UPDATE, stage, None, reads - 1)}, and " * bool(
                reads
            )
            next_update = Op(Kind.UPDATE, stage, None, reads)
            yield (
                f"{where} gathers the weights of stage {stage} after {seen} updates, "
                f"but step {op.step} reads those after {reads}, and a shard has one "
                f"version: put it {least}before {next_update}",
                op,
            )
        self.whole[stage] = op
        self.num_readers[stage] = 0

    def _number(self, op: Op) -> Iterator[Fault]:
        count = self.num_gathers[op.stage, op.step]
        self.num_gathers[op.stage, op.step] += 1
        if op.microbatch != count:
            wanted = Op(op.kind, op.stage, count, op.step)
            yield (
                f"{self._where(op)} is gather {count} of stage {op.stage} in step "
                f"{op.step}: write {wanted}, since they are numbered from 0",
                op,
            )

    def _reshard(self, op: Op) -> Iterator[Fault]:
        where, gather = self._where(op), self.whole.pop(op.stage, None)
        if gather is None:
            yield (
                f"{where} releases the whole weights of stage {op.stage}, which is "
                f"sharded there: leave it out, or put {op.as_kind(Kind.UNSHARD)} "
                "before it",
                op,
            )
            return
        wanted = gather.as_kind(Kind.RESHARD)
        if op != wanted:
            yield f"{where} releases what {gather} gathered: write {wanted}", op
        if not self.num_readers[op.stage]:
            yield (
                f"no op between {gather} and {where} reads the weights of stage "
                f"{op.stage}: leave both out",
                op,
            )

    def _read(self, op: Op) -> Iterator[Fault]:
        gather, stage = self.whole.get(op.stage), op.stage
        if gather is not None and gather.step == op.step:
            self.num_readers[stage] += 1
        elif stage not in self.named:
            self.named.add(stage)  # the others would say the same
            number = self.num_gathers[stage, op.step]
            unshard = Op(Kind.UNSHARD, stage, number, op.step)
            how = f"whole for step {gather.step} alone" if gather else "sharded"
            yield (
                f"{self._where(op)} reads the weights of stage {stage} while it is "
                f"{how}: put {unshard} before it ({_PASS})",
                op,
            )

    def _update(self, op: Op) -> Iterator[Fault]:
        gather = self.whole.get(op.stage)
        self.num_updates[op.stage] += 1
        if gather is not None:
            yield (
                f"{self._where(op)} updates stage {op.stage} while it is whole by "
                f"{gather}: put {gather.as_kind(Kind.RESHARD)} before it",
                op,
            )

    def _refuse_whole(self, when: str, step: int | None = None) -> Iterator[Fault]:
        """Refuse stages that are whole, but for gathers of this step."""
        for stage, gather in self.whole.items():
            if gather.step == step or gather in self.named:
                continue
            self.named.add(gather)
            yield (
                f"stage {stage} on device {self.lane.device} is whole by {gather} "
                f"when {when}: put {gather.as_kind(Kind.RESHARD)} behind the last op "
                "that reads its weights",
                gather,
            )

    def _where(self, op: Op) -> str:
        return f"{op} on device {self.lane.device}"
