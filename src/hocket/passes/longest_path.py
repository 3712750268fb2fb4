"""Put the longest path of ops into one lane, and all others into a second one.

It is the rule by which torchsched of NVIDIA's apex assigns streams: the longest path
first, the rest round robin to the other streams, of which there is one here. It reads
no memory limit, and moves a W off the critical path whether or not that gains anything.

Source: apex, `apex/contrib/torchsched` (2025).
"""

from __future__ import annotations

from hocket.core.costs import Costs
from hocket.core.dataflow import makes, needs
from hocket.core.op import Op
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule
from hocket.passes.serial import serial


def longest_path(program: Program, costs: Costs) -> Schedule:
    """Return an order of one step in two lanes, each in the serial order.

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
