"""What is held in memory, one by one, straight from the definitions: an oracle."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hocket.core.costs import Costs, StageCost
from hocket.core.dataflow import Fact, Value, needs, version_read
from hocket.core.op import BACKWARDS, COLLECTIVES, MESSAGES, Kind, Op
from hocket.core.timelines.timeline import Timeline

Hold = tuple[int, float, float, int]  # device, begin_s, end_s, bytes
When = dict[Op, tuple[float, float]]  # start and end of every op


def holds_of(timeline: Timeline, costs: Costs) -> Iterator[Hold]:
    """Everything that is held, one by one, straight from what the module promises."""
    forever = float("inf")
    program = timeline.schedule.program
    stage_costs = costs.of(program)
    for stage, cost in zip(program.stages, stage_costs, strict=True):
        yield stage.device, -1.0, forever, cost.weight_bytes
        if stage.trainable:
            yield stage.device, -1.0, forever, cost.optimizer_bytes
    when = {span.op: (span.start_s, span.end_s) for span in timeline.spans}
    for op, (start_s, end_s) in when.items():
        device, cost = program.stages[op.stage].device, stage_costs[op.stage]
        yield device, start_s, end_s, work_bytes(op, cost)
        yield from whole_holds(op, timeline, costs, when)
        if op.kind in BACKWARDS | {Kind.FORWARD}:
            yield from local_holds(op, timeline, costs, when)
        if op.kind is Kind.FORWARD:
            yield from forward_holds(op, timeline, costs, when)
        elif op.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            yield from gradient_holds(op, timeline, costs, when)
        elif op.kind is Kind.UPDATE:
            reads = [
                when[reader][1]
                for reader in when
                if op.step in versions_read(reader, op.stage, timeline)
            ]
            yield device, start_s, max(reads, default=start_s), cost.weight_bytes
    yield from received_holds(timeline, costs, when)


def whole_holds(op: Op, timeline: Timeline, costs: Costs, when: When) -> Iterator[Hold]:
    """Whole weights, from their gather to their release."""
    if op.kind is Kind.UNSHARD:
        program = timeline.schedule.program
        end_s = when[op.as_kind(Kind.RESHARD)][1]
        num_bytes = costs.of(program)[op.stage].whole_bytes
        yield program.stages[op.stage].device, when[op][0], end_s, num_bytes


def gradient_holds(
    op: Op, timeline: Timeline, costs: Costs, when: When
) -> Iterator[Hold]:
    """A step's gradients: whole until R, and one shard of them until the update."""
    program = timeline.schedule.program
    device, cost = program.stages[op.stage].device, costs.of(program)[op.stage]
    begin_s, end_s = gradient_span(op, when)
    part = -(-cost.gradient_bytes // program.num_shards)
    yield device, begin_s, end_s, part
    reduce = Op(Kind.REDUCE, op.stage, None, op.step)
    if reduce in when and end_s > begin_s:
        end_s = when[reduce][1]
    yield device, begin_s, end_s, cost.gradient_bytes - part


def gradient_span(op: Op, when: When) -> tuple[float, float]:
    """How long a step's gradients are there; nothing for all but the first that makes.

    From the end of the first backward until the update's end, where there is one.
    """
    makers = [
        other
        for other in when
        if other.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        and (other.stage, other.step) == (op.stage, op.step)
    ]
    first = min(makers, key=lambda other: when[other][1])
    begin_s = when[first][1]
    if op != first:
        return begin_s, begin_s
    update = Op(Kind.UPDATE, op.stage, None, op.step)
    return begin_s, when[update][1] if update in when else max(
        e for _, e in when.values()
    )


def work_bytes(op: Op, cost: StageCost) -> int:
    """What an op holds while it runs, and no longer."""
    match op.kind:
        case Kind.FORWARD:
            return cost.forward_work_bytes if cost.recomputes else 0
        case Kind.BACKWARD:
            return cost.backward_work_bytes
        case Kind.BACKWARD_INPUT:
            return cost.input_grad_work_bytes
        case Kind.BACKWARD_WEIGHT:
            return cost.weight_grad_work_bytes
        case Kind.REDUCE:
            return cost.gradient_bytes
        case Kind.UPDATE:
            return cost.update_work_bytes
        case _:
            return 0


def released_s(reader: Op, timeline: Timeline, costs: Costs, when: When) -> float:
    """When an op needs no more what it read: a forward when its backward has ended."""
    kinds = [Kind.BACKWARD, Kind.BACKWARD_INPUT]
    if costs.of(timeline.schedule.program)[reader.stage].holds_input:
        kinds.append(Kind.BACKWARD_WEIGHT)
    backwards = [
        Op(kind, reader.stage, reader.microbatch, reader.step)
        for kind in (kinds if reader.kind is Kind.FORWARD else ())
    ]
    return max(when[op][1] for op in (reader, *backwards) if op in when)


def local_holds(op: Op, timeline: Timeline, costs: Costs, when: When) -> Iterator[Hold]:
    """What a stage of the same device reads stays until it has no more use for it."""
    program = timeline.schedule.program
    stage, cost = program.stages[op.stage], costs.of(program)[op.stage]
    if not stage.trainable:
        return
    is_forward = op.kind is Kind.FORWARD
    fact = Fact.OUTPUT if is_forward else Fact.INPUT_GRAD
    value = Value(fact, op.stage, op.microbatch, op.step)
    reads = [
        released_s(reader, timeline, costs, when)
        for reader in when
        if program.stages[reader.stage].device == stage.device
        and reader.stage != op.stage
        and reader.kind not in MESSAGES
        and value in needs(reader, program)
    ]
    size = cost.output_bytes if is_forward else cost.input_grad_bytes
    end_s = when[op][1]
    yield stage.device, end_s, max(reads, default=end_s), size


def forward_holds(
    op: Op, timeline: Timeline, costs: Costs, when: When
) -> Iterator[Hold]:
    """What a forward leaves behind, and what is made again in a backward."""
    program = timeline.schedule.program
    stage = program.stages[op.stage]
    cost = costs.of(program)[op.stage]
    start_s, end_s = when[op]
    backward, into, weight = (
        when.get(Op(kind, op.stage, op.microbatch, op.step))
        for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    whole, kept = cost.activation_bytes, cost.kept_bytes
    back = backward or into
    if back:
        yield stage.device, start_s, back[1], kept
        yield stage.device, *back, whole - kept
        if weight:
            yield stage.device, back[1], weight[1], cost.weight_grad_held_bytes
    else:
        yield stage.device, start_s, end_s, cost.activation_bytes
        output = Value(Fact.OUTPUT, op.stage, op.microbatch, op.step)
        uses = [
            when[reader][1]
            if reader.stage == op.stage
            else released_s(reader, timeline, costs, when)
            for reader in when
            if program.stages[reader.stage].device == stage.device
            and output in needs(reader, program)
        ]
        sent = [t.end_s for t in timeline.transfers if t.op == op]
        last = max([*uses, *sent], default=end_s)
        yield stage.device, end_s, last, cost.output_bytes


def versions_read(reader: Op, stage: int, timeline: Timeline) -> set[int]:
    """Which versions of a stage's weights an op reads, besides its own update."""
    program = timeline.schedule.program
    if reader.stage == stage:
        reads = reader.kind is Kind.FORWARD or reader.kind in BACKWARDS
        return {version_read(stage, reader.step, program)} if reads else set()
    is_follower = stage in program.stages[reader.stage].follows
    return {reader.step + 1} if reader.kind is Kind.UPDATE and is_follower else set()


def received_holds(timeline: Timeline, costs: Costs, when: When) -> Iterator[Hold]:
    """Messages at the device where they arrive."""
    program = timeline.schedule.program
    receives = {op: span for op, span in when.items() if op.kind in MESSAGES}
    for transfer in timeline.transfers:
        if transfer.op.kind in COLLECTIVES:
            continue
        forward = transfer.op.kind is Kind.FORWARD
        fact = Fact.OUTPUT if forward else Fact.INPUT_GRAD
        made = transfer.op
        value = Value(fact, made.stage, made.microbatch, made.step)
        uses = [
            released_s(reader, timeline, costs, when)
            for reader in when
            if program.stages[reader.stage].device == transfer.to_device
            and reader.kind not in MESSAGES
            and value in needs(reader, program)
        ]
        kind = Kind.RECEIVE_FORWARD if forward else Kind.RECEIVE_BACKWARD
        posted = [
            start_s
            for op, (start_s, _) in receives.items()
            if (op.kind, op.peer) == (kind, made.stage)
            and (op.microbatch, op.step) == (made.microbatch, made.step)
            and program.stages[op.stage].device == transfer.to_device
        ]
        begin = posted[0] if posted else transfer.start_s
        yield transfer.to_device, begin, max(uses), transfer.num_bytes


def assert_curves_add_up(timeline: Timeline, costs: Costs) -> None:
    """Between any two instants, the bytes are the sum over all that is held then."""
    holds = [*holds_of(timeline, costs)]
    ends = {time for _, begin, end, _ in holds for time in (begin, end)}
    changes = {float(t) for curve in timeline.memory for t in curve.time_s}
    instants = sorted(t for t in {0.0} | ends | changes if 0.0 <= t < float("inf"))

    for begin, end in pairwise([*instants, instants[-1] + 1.0]):
        middle = (begin + end) / 2
        expected = [0] * timeline.schedule.program.num_devices
        for device, from_s, until_s, num_bytes in holds:
            if from_s < middle < until_s:
                expected[device] += num_bytes
        assert [curve.at(middle) for curve in timeline.memory] == expected
