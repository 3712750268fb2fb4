"""A program whose nets have copies, as one without: one net with all microbatches.

chimera   down: 2 microbatches, up: 2, a copy of down      here   down: 4
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hocket.core.program import Program
from hocket.errors import ModelError


@dataclass(frozen=True, slots=True)
class Merged:
    """What is computed, each net once.

    Args:
        program: without copies.
        shares: the microbatches per step of each copy, in order, by net.
    """

    program: Program
    shares: Mapping[str, tuple[int, ...]]


def without_copies(program: Program) -> Merged:
    """Drop all stages but the first of each group of copies.

    The microbatches of a step are shared out over the copied nets, in order.

    Raises:
        ModelError: a part of a net has copies, and not the whole; or a net with copies
            has a loss over the whole batch.
    """
    first = {stage: min(group) for group in program.copies for stage in group}
    original = {
        stage.net: program.stages[first.get(number, number)].net
        for number, stage in enumerate(program.stages)
    }
    for number, stage in enumerate(program.stages):
        if program.stages[first.get(number, number)].net != original[stage.net]:
            raise ModelError(
                f"stage {number} of net {stage.net} is no copy of a stage of net "
                f"{original[stage.net]}, as others of its net are: copy whole nets"
            )
    shares: dict[str, tuple[int, ...]] = {}
    for net in program.nets:
        name = original[net.name]
        shares[name] = (*shares.get(name, ()), net.num_microbatches)
        if net.batch_loss and len(shares[name]) > 1:
            raise ModelError(
                f"nets {name} and {net.name} are copies, and their loss is over the "
                "whole batch: give nets with copies a loss per microbatch"
            )
    kept = [i for i, x in enumerate(program.stages) if original[x.net] == x.net]
    places = {number: place for place, number in enumerate(kept)}
    devices = sorted({program.stages[number].device for number in kept})
    stages = [
        replace(
            program.stages[number],
            device=devices.index(program.stages[number].device),
            follows=tuple(
                places[first.get(other, other)]
                for other in program.stages[number].follows
            ),
        )
        for number in kept
    ]
    found = replace(
        program,
        nets=tuple(
            replace(net, num_microbatches=sum(shares[net.name]))
            for net in program.nets
            if net.name in shares
        ),
        stages=tuple(stages),
        flows=tuple(
            (places[a], places[b])
            for a, b in program.flows
            if a in places and b in places
        ),
        copies=(),
        whole_batch_flows=frozenset(
            (places[a], places[b])
            for a, b in program.whole_batch_flows
            if a in places and b in places
        ),
    )
    return Merged(found, shares)
