"""Run weight gradients and updates in a second lane, beside the critical path.

    lane 0   F F F │ I I I I I I │ W U        behind the last I: W that are left
    lane 1         │   W U W U W U │          the first W whose I is done

List scheduling: the lane that is free first takes the next op. Lane 0 has all F and I
in their order, lane 1 the W (each with its U) in the order of their I.

A W that waits keeps the activations and gradients that it reads. Under a memory limit,
the W that read most bytes stay behind their I in lane 0; if all do, it is the serial
order.

Source: Oh, Lee, Kim and Seo, "Out-of-Order BackProp", EuroSys 2022, section 4. Theirs
places a W by its measured speed-up in each region of the critical path, and their code
holds the places as tables made by hand; this is list scheduling on measured times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from hocket.core.costs import Costs
from hocket.core.dataflow import makes, needs
from hocket.core.footprint import Footprint, MemoryPlan, plan_memory
from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule
from hocket.core.simulate import simulate
from hocket.passes.serial import gradient_and_update, serial

# Lanes wait for ops that are predicted to end at least this share of a step earlier: as
# predictions are some percent off, such a wait still takes no time.
_SLACK: Final = 0.02


@dataclass(frozen=True, slots=True)
class MeasuredProgram:
    """A program of one device, with the seconds and bytes of its ops.

    Args:
        program: one microbatch, on one device.
        costs: seconds.
        footprint: bytes.
    """

    program: Program
    costs: Costs
    footprint: Footprint


def beside_critical_path(
    measured: MeasuredProgram, memory_bytes: int | None = None
) -> MemoryPlan:
    """Return an order in two lanes that takes at most so much memory.

    Args:
        measured: the program.
        memory_bytes: the limit; the serial order must keep it. None for no limit.
    """
    program, costs = measured.program, measured.costs.of(measured.program)
    empty = [i for i, x in enumerate(costs) if not x.weight_grad_s + x.update_s]
    others = sorted(
        set(range(program.num_stages)).difference(empty),
        key=lambda stage: -_bytes_read(stage, measured.footprint),
    )
    plan = with_inline(measured, empty)
    if memory_bytes is None or plan.peak_bytes <= memory_bytes:
        return plan
    # Bisection for the fewest inline W that fit; with all of them, the order is serial.
    low, high = 1, len(others)
    plan = with_inline(measured, [*empty, *others])
    while low < high:
        middle = (low + high) // 2
        tried = with_inline(measured, [*empty, *others[:middle]])
        if tried.peak_bytes <= memory_bytes:
            plan, high = tried, middle
        else:
            low = middle + 1
    return plan


def longest_path(program: Program, costs: Costs) -> Schedule:
    """Put the longest path of ops into one lane, and all others into a second one.

    Each lane is in the serial order. It is the rule by which torchsched of NVIDIA's
    apex assigns streams (`apex/contrib/torchsched`, 2025): it reads no memory limit,
    and moves a W off the critical path whether or not that gains anything.

    Args:
        program: one microbatch, on one device.
        costs: the seconds of its ops.

    >>> from hocket.core.costs import StageCost
    >>> program = Program.chain([0, 0], 1)
    >>> print(longest_path(program, Costs((StageCost(1.0, 2.0, 1.0),) * 2)))
    d0    0F0 1F0 1I0 0I0 0W0 0U
    d0.1  1W0 1U
    """
    of_stage = costs.of(program)
    ops = serial(program).lanes[0].ops
    maker = {value: op for op in ops for value in makes(op, program)}
    length: dict[Op, tuple[float, Op | None]] = {}
    for op in ops:
        sources = [maker[value] for value in needs(op, program) if value in maker]
        before = max(sources, key=lambda x: length[x][0], default=None)
        until = 0.0 if before is None else length[before][0]
        length[op] = until + of_stage[op.stage].seconds(op.kind), before
    # The last op of several that end last: updates may take no time.
    end: Op | None = max(reversed(ops), key=lambda op: length[op][0])
    path: set[Op] = set()
    while end is not None:
        path.add(end)
        end = length[end][1]
    main = tuple(op for op in ops if op in path)
    rest = tuple(op for op in ops if op not in path)
    lanes = (Lane(0, 0, main), Lane(0, 1, rest)) if rest else (Lane(0, 0, main),)
    return Schedule(program, lanes)


def with_inline(measured: MeasuredProgram, inline: Collection[int]) -> MemoryPlan:
    """Return the list schedule in which some stages' W and U stay behind their I.

    Args:
        measured: the program.
        inline: the stages whose W and U are in lane 0, right behind their I.
    """
    program = measured.program
    if len(set(inline)) == program.num_stages:
        return plan_memory(serial(program), measured.footprint)
    lanes = _listed(measured, frozenset(inline))
    schedule = Schedule(
        program, tuple(Lane(0, i, tuple(ops)) for i, ops in enumerate(lanes) if ops)
    )
    return with_early_release(schedule, measured)


def with_early_release(schedule: Schedule, measured: MeasuredProgram) -> MemoryPlan:
    """Plan an order's memory, with waits for ops that are predicted to be done.

    Such a wait takes no time, and shows the lane that it may release what those ops
    have read.

    Args:
        schedule: an order in one or two lanes.
        measured: its program.
    """
    timeline = simulate(schedule, measured.costs)
    slack_s = _SLACK * timeline.makespan_s
    waits: dict[Op, tuple[Op, ...]] = {}
    for number, lane in enumerate(schedule.lanes):
        for other, beside in enumerate(schedule.lanes):
            if other == number:
                continue
            ended_s, seen = timeline.end_s[other].tolist(), 0
            for i, op in enumerate(lane.ops):
                until_s = timeline.start_s[number][i] - slack_s
                num = seen
                while num < len(ended_s) and ended_s[num] <= until_s:
                    num += 1
                if num > seen:
                    waits[op], seen = (beside.ops[num - 1],), num
    return plan_memory(schedule, measured.footprint, waits)


def _listed(
    measured: MeasuredProgram, inline: frozenset[int]
) -> tuple[list[Op], list[Op]]:
    """Return the ops of both lanes, by list scheduling.

    Args:
        measured: the program.
        inline: the stages whose W and U are in lane 0, right behind their I.
    """
    costs = measured.costs.of(measured.program)
    main = deque(_main_ops(measured.program, inline))
    lanes: tuple[list[Op], list[Op]] = [], []
    free_s = [0.0, 0.0]
    ready: deque[tuple[float, int]] = deque()  # the end of I, and the stage of its W

    def run(lane: int, ops: Iterator[Op] | tuple[Op, ...], start_s: float) -> None:
        free_s[lane] = max(free_s[lane], start_s)
        for op in ops:
            lanes[lane].append(op)
            free_s[lane] += costs[op.stage].seconds(op.kind)

    while main or ready:
        side_s = max(free_s[1], ready[0][0]) if ready else float("inf")
        if main and (free_s[0] <= side_s or not ready):
            op = main.popleft()
            run(0, (op,), 0.0)
            if op.kind is Kind.BACKWARD_INPUT and op.stage not in inline:
                ready.append((free_s[0], op.stage))
            continue
        ready_s, stage = ready.popleft()
        lane = 0 if not main and free_s[0] < side_s else 1
        run(lane, gradient_and_update(stage), ready_s)
    return lanes


def _main_ops(program: Program, inline: frozenset[int]) -> Iterator[Op]:
    for stage in range(program.num_stages):
        yield Op(Kind.FORWARD, stage, 0)
    for stage in reversed(range(program.num_stages)):
        yield Op(Kind.BACKWARD_INPUT, stage, 0)
        if stage in inline:
            yield from gradient_and_update(stage)


def _bytes_read(stage: int, footprint: Footprint) -> int:
    events = footprint.of(Op(Kind.BACKWARD_WEIGHT, stage, 0))
    made = {event for event in events if event > 0}
    return sum(footprint.sizes[-x - 1] for x in events if x < 0 and -x not in made)


def stages_beside(schedule: Schedule) -> Mapping[int, bool]:
    """Return for each stage whether its W is not in lane 0."""
    return {
        op.stage: number > 0
        for number, lane in enumerate(schedule.lanes)
        for op in lane.ops
        if op.kind is Kind.BACKWARD_WEIGHT
    }
