"""Define what each op needs and makes; no other file does.

One microbatch of one step on stage s, between its neighbours a (before) and b (after):

    OUTPUT a ──▶ F ──▶ OUTPUT s ──▶ (F b)       WEIGHTS s, version max(0, t - delay),
                          │                     is read by F, B and I
                          ▼
    INPUT_GRAD s ◀── I ◀── INPUT_GRAD b         at the end of a net, the loss is part
                     │                          of F, or op L makes LOSS_GRAD s out of
                     ▼                          the outputs of all microbatches
                     W ──▶ WEIGHT_GRAD s

and once per step: WEIGHT_GRAD s of all microbatches ──▶ R ──▶ REDUCED_GRAD s ──▶ U,
which turns WEIGHTS s of version t into version t + 1. Version 0 is given. R is a
collective: where stages are copies of one another, the U of each needs the R of all.
Where a whole-batch loss is over all replicas, OUTPUT of all microbatches ──▶ G ──▶
GATHERED, which L reads in the place of outputs; and so does F, where the loss of each
microbatch is over the outputs of another net for the whole batch.

Where stages are sharded, WEIGHTS s are those of a device's own shard. UNSHARD gathers
WHOLE_WEIGHTS out of them, which F, B, I, W and L read until RESHARD releases them.
Which gather it is that an op reads, the order says: the last one before it in its lane.

The knowledge is kept as *rules*: what an op of some kind on some stage needs, whatever
its microbatch and step. `needs` and `makes` fill in the numbers for one op; the
simulator and the checker fill them in for a million at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple, assert_never

from hocket.core.op import MESSAGES, READS_WEIGHTS, WHOLE_OR_SPLIT_BACKWARD, Kind, Op
from hocket.core.program import Program


class Fact(Enum):
    """What a value is. The text says how errors name it."""

    OUTPUT = "y"
    INPUT_GRAD = "dx"
    WEIGHT_GRAD = "dw"
    LOSS_GRAD = "dloss"
    GATHERED = "gathered y"
    REDUCED_GRAD = "reduced dw"
    WEIGHTS = "weights"
    WHOLE_WEIGHTS = "whole weights"  # gathered from shards, once or more in a step

    __hash__ = object.__hash__  # as in Kind: identity is sound, and fast


class Value(NamedTuple):
    """One value of the program; microbatch is None where it is one per step.

    For WEIGHTS, `step` counts the updates that made them.
    """

    fact: Fact
    stage: int
    microbatch: int | None
    step: int

    def __str__(self) -> str:
        """Name the value as errors do: `dx[stage 1, microbatch 0]`."""
        if self.fact is Fact.WEIGHTS:
            return f"weights[stage {self.stage}, after {self.step} updates]"
        where = f"stage {self.stage}"
        if self.microbatch is not None:
            where += f", microbatch {self.microbatch}"
        if self.step:
            where += f", step {self.step}"
        return f"{self.fact.value}[{where}]"


@dataclass(frozen=True, slots=True)
class Rule:
    """A value that ops of some kind and stage need or make.

    Args:
        fact: what it is.
        stage: the stage that it belongs to.
        shift: its step minus the op's (never below step 0).
        num_read: the number of microbatches whose values the op needs; all of the
            step's for an op that is done once per step, or reads the whole batch.
        num_readers: the number of the op's microbatches that need the same ones: its
            microbatch `i` reads those from `i // num_readers * num_read` on.
    """

    fact: Fact
    stage: int
    shift: int = 0
    num_read: int = 1
    num_readers: int = 1


NEVER_SENT: Final = frozenset({Fact.REDUCED_GRAD})
PER_MICROBATCH = frozenset(
    {Fact.OUTPUT, Fact.INPUT_GRAD, Fact.WEIGHT_GRAD, Fact.WHOLE_WEIGHTS}
)


@lru_cache(maxsize=65536)
def need_rules(kind: Kind, stage: int, program: Program) -> tuple[Rule, ...]:
    """Return what any op of this kind on this stage needs."""
    weights = _weights_read(stage, program)
    match kind:
        case Kind.FORWARD:
            return (*_inputs(stage, program), *weights)
        case Kind.BACKWARD | Kind.BACKWARD_INPUT:
            return (Rule(Fact.OUTPUT, stage), *_output_grads(stage, program), *weights)
        case Kind.LOSS:
            return _loss_needs(stage, program)
        case Kind.UNSHARD:
            return weights
        case Kind.GATHER | Kind.REDUCE:
            return (_every(_COLLECTED[kind], stage, program),)
        case Kind.UPDATE:
            return _update_needs(stage, program)
        case (
            Kind.SEND_FORWARD
            | Kind.SEND_BACKWARD
            | Kind.RECEIVE_FORWARD
            | Kind.RECEIVE_BACKWARD
            | Kind.BACKWARD_WEIGHT
            | Kind.RESHARD
        ):
            return tuple(Rule(fact, stage) for fact in _OWN.get(kind, ()))
        case _:
            assert_never(kind)


_COLLECTED: Final = {Kind.GATHER: Fact.OUTPUT, Kind.REDUCE: Fact.WEIGHT_GRAD}
_OWN: Final = {
    Kind.BACKWARD_WEIGHT: (Fact.INPUT_GRAD,),
    Kind.RESHARD: (Fact.WHOLE_WEIGHTS,),
    Kind.SEND_FORWARD: (Fact.OUTPUT,),
    Kind.SEND_BACKWARD: (Fact.INPUT_GRAD,),
}


@lru_cache(maxsize=65536)
def make_rules(kind: Kind, stage: int) -> tuple[Rule, ...]:
    """Return what any op of this kind on this stage makes."""
    return tuple(Rule(fact, stage, int(fact is Fact.WEIGHTS)) for fact in _MADE[kind])


_MADE: Final = {
    Kind.FORWARD: (Fact.OUTPUT,),
    Kind.BACKWARD: (Fact.INPUT_GRAD, Fact.WEIGHT_GRAD),
    Kind.BACKWARD_INPUT: (Fact.INPUT_GRAD,),
    Kind.BACKWARD_WEIGHT: (Fact.WEIGHT_GRAD,),
    Kind.LOSS: (Fact.LOSS_GRAD,),
    Kind.GATHER: (Fact.GATHERED,),
    Kind.REDUCE: (Fact.REDUCED_GRAD,),
    Kind.UPDATE: (Fact.WEIGHTS,),  # of the version that comes next
    Kind.UNSHARD: (Fact.WHOLE_WEIGHTS,),
    Kind.RESHARD: (),
    **dict.fromkeys(MESSAGES, ()),  # they move a value and make none
}


def needs(op: Op, program: Program) -> tuple[Value, ...]:
    """Return the values that must exist before `op` may start."""
    return tuple(_fill(need_rules(op.kind, op.stage, program), op))


def lane_needs(
    ops: Iterable[Op], program: Program
) -> Iterator[tuple[Op, tuple[Value, ...]]]:
    """Yield each op of a lane, and what it needs: `needs`, and the gather before it.

    An op that reads weights of a sharded stage needs what the last UNSHARD of its stage
    makes, which is the order's choice.
    """
    whole: dict[int, tuple[Value, ...]] = {}
    for op in ops:
        gathered = whole.get(op.stage, ()) if op.kind in READS_WEIGHTS else ()
        yield op, (*needs(op, program), *gathered)
        if op.kind is Kind.UNSHARD:
            whole[op.stage] = makes(op, program)


def makes(op: Op, program: Program) -> tuple[Value, ...]:
    """Return the values that exist once `op` has ended."""
    return tuple(_fill(make_rules(op.kind, op.stage), op))


def reads(op: Op, program: Program) -> tuple[Value, ...]:
    """Return the values that `op` needs, and those kept from earlier ops that it reads.

    B, I and W also read the inputs of the forward; W also reads the gradients of the
    output, which I needed before it.
    """
    return tuple(_fill(read_rules(op.kind, op.stage, program), op))


@lru_cache(maxsize=65536)
def read_rules(kind: Kind, stage: int, program: Program) -> tuple[Rule, ...]:
    """Return what any op of this kind on this stage reads."""
    kept: list[Rule] = []
    if kind in WHOLE_OR_SPLIT_BACKWARD:
        kept += need_rules(Kind.FORWARD, stage, program)
    if kind is Kind.BACKWARD_WEIGHT:
        kept += need_rules(Kind.BACKWARD_INPUT, stage, program)
    kept = [rule for rule in kept if rule.fact is not Fact.WEIGHTS]
    return tuple(dict.fromkeys((*need_rules(kind, stage, program), *kept)))


def is_given(value: Value) -> bool:
    """Return whether a value exists before any work is done: the initial weights."""
    return value.fact is Fact.WEIGHTS and value.step == 0


def is_sent(value: Value, device: int, program: Program) -> bool:
    """Return whether a device that needs a value gets it by a message.

    A collective brings its result to all its members without one.
    """
    is_elsewhere = program.stages[value.stage].device != device
    return is_elsewhere and value.fact not in NEVER_SENT


def maker(value: Value, program: Program) -> str:
    """Return the op that makes a value, as errors name it (a backward as B)."""
    kind = {
        Fact.OUTPUT: Kind.FORWARD,
        Fact.INPUT_GRAD: Kind.BACKWARD,
        Fact.WEIGHT_GRAD: Kind.BACKWARD,
        Fact.LOSS_GRAD: Kind.LOSS,
        Fact.GATHERED: Kind.GATHER,
        Fact.REDUCED_GRAD: Kind.REDUCE,
        Fact.WEIGHTS: Kind.UPDATE,
        Fact.WHOLE_WEIGHTS: Kind.UNSHARD,
    }[value.fact]
    step = value.step - (value.fact is Fact.WEIGHTS)
    op = Op(kind, value.stage, value.microbatch, step)
    return f"{op} on device {program.stages[value.stage].device}"


def due_ops(program: Program) -> Iterator[Op]:
    """Yield every op that a schedule of this program must hold exactly once.

    Backwards appear whole (B); a schedule may hold I and W in their place. Messages,
    UNSHARD and RESHARD are not among them: passes add those.
    """
    for step in range(program.num_steps):
        for number, stage in enumerate(program.stages):
            kinds = (Kind.FORWARD, Kind.BACKWARD)[: 1 + stage.trainable]
            for microbatch in range(program.num_microbatches_of(number)):
                yield from (Op(kind, number, microbatch, step) for kind in kinds)
            for kind in once_per_step(number, program):
                yield Op(kind, number, None, step)


def once_per_step(stage: int, program: Program) -> Iterator[Kind]:
    """Yield the kinds of op that a stage has once in every step."""
    if stage in program.gathered_stages:
        yield Kind.GATHER
    if stage in program.loss_stages:
        yield Kind.LOSS
    if stage in program.reduced_stages:
        yield Kind.REDUCE
    if program.stages[stage].moves:
        yield Kind.UPDATE


def most_gathers(stage: int, program: Program) -> int:
    """Return how often a stage may be gathered in a step: for each F, I, W and L."""
    if program.num_shards == 1:
        return 0
    return 3 * program.num_microbatches_of(stage) + (stage in program.loss_stages)


def version_read(stage: int, step: int, program: Program) -> int:
    """Return how many updates the weights have seen that `step` reads on `stage`."""
    if not program.stages[stage].moves:
        return 0
    return max(0, step - program.stages[stage].delay)


def _fill(rules: tuple[Rule, ...], op: Op) -> Iterator[Value]:
    for rule in rules:
        step = max(0, op.step + rule.shift)
        if rule.fact not in PER_MICROBATCH:
            yield Value(rule.fact, rule.stage, None, step)
            continue
        first = (op.microbatch or 0) // rule.num_readers * rule.num_read
        for microbatch in range(first, first + rule.num_read):
            yield Value(rule.fact, rule.stage, microbatch, step)


def _every(fact: Fact, stage: int, program: Program) -> Rule:
    """Return a rule for the values of all microbatches of the step."""
    return Rule(fact, stage, num_read=program.num_microbatches_of(stage))


def _weights_read(stage: int, program: Program) -> tuple[Rule, ...]:
    facts = program.stages[stage]
    return (Rule(Fact.WEIGHTS, stage, -facts.delay),) if facts.moves else ()


def _inputs(stage: int, program: Program) -> tuple[Rule, ...]:
    """Return what the stage's forward reads, and its whole-batch loss does not."""
    read_by_loss = program.loss_inputs(stage)
    sources = program.sources[stage]
    return tuple(_input(s, stage, program) for s in sources if s not in read_by_loss)


def _input(source: int, stage: int, program: Program) -> Rule:
    """Return what one microbatch of a stage reads of another stage's outputs.

    Where the source has finer microbatches, it is those that the stage's microbatch is
    made of; where it has coarser ones, the one that the stage's is a part of.
    """
    num_from = program.num_microbatches_of(source)
    num_to = program.num_microbatches_of(stage)
    if program.reads_gathered(source, stage):
        return Rule(Fact.GATHERED, source)
    if (source, stage) in program.whole_batch_flows:
        return Rule(Fact.OUTPUT, source, num_read=num_from, num_readers=num_to)
    num_read, num_readers = max(1, num_from // num_to), max(1, num_to // num_from)
    return Rule(Fact.OUTPUT, source, num_read=num_read, num_readers=num_readers)


def _loss_needs(stage: int, program: Program) -> tuple[Rule, ...]:
    inputs = program.loss_inputs(stage)
    if program.gathers(stage):
        return tuple(Rule(Fact.GATHERED, s) for s in inputs)
    return tuple(_every(Fact.OUTPUT, s, program) for s in inputs)


def _output_grads(stage: int, program: Program) -> tuple[Rule, ...]:
    if stage in program.loss_stages:
        return (Rule(Fact.LOSS_GRAD, stage),)
    return tuple(
        Rule(Fact.INPUT_GRAD, target) for target in program.gradient_targets[stage]
    )


def _update_needs(stage: int, program: Program) -> tuple[Rule, ...]:
    facts = program.stages[stage]
    own = Rule(Fact.WEIGHTS, stage)
    if not facts.trainable:
        return (own, *(Rule(Fact.WEIGHTS, other, 1) for other in facts.follows))
    if stage in program.reduced_stages:
        copies = program.copies_of[stage]
        return (own, *(Rule(Fact.REDUCED_GRAD, copy) for copy in copies))
    return (own, _every(Fact.WEIGHT_GRAD, stage, program))
