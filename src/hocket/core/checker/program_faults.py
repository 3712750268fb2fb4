"""Find the facts of a program that contradict each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hocket.core.program import Program

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
    faults += _whole_batch_faults(program)
    names = {net.name for net in program.nets}
    if faults or any(stage.net not in names for stage in program.stages):
        return faults
    return list(_net_flow_faults(program))


def _whole_batch_faults(program: Program) -> list[str]:
    return [
        f"flow {a} -> {b} is to read the whole batch, but is not listed as a flow"
        for a, b in sorted(program.whole_batch_flows.difference(program.flows))
    ]


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
