"""Which values go along each flow, by their places in what a stage makes.

A stage's forward makes outputs, and its backward gradients of its inputs. Each goes
along some flows only:

    outputs of stage 0     x  y  z          gradients that stage 2 makes     x  z  u
    along 0 -> 1              y  z          along 2 -> 0                     x  z
    along 0 -> 2           x     z          along 2 -> 1                           u

A gradient of a value that several stages read is the sum of theirs. What goes from net
to net is the model's output, leaf by leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hocket.core.program import Program
from hocket.model.stages.stage import StageModule
from hocket.run.engine.programs.net_setup import NetSetup, modules_of
from hocket.run.stage.net_output import NetOutput

Places: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlowValues:
    """What goes along one flow.

    Args:
        sent: places among the source's outputs.
        returned: places among the gradients that the target makes.
        wanted: those places among the source's outputs that want a gradient.
    """

    sent: Places
    returned: Places = ()
    wanted: Places = ()


@dataclass(frozen=True, slots=True)
class Wiring:
    """The flows of a program, and what its stages take and give.

    Args:
        links: what goes along each flow; all values along a flow that is not listed.
        takes_grad: whether each input of a stage wants a gradient, by stage.
        gives_grad: whether each output of a stage wants one, by stage.
    """

    links: Mapping[tuple[int, int], FlowValues] = field(default_factory=dict)
    takes_grad: Mapping[int, tuple[bool, ...]] = field(default_factory=dict)
    gives_grad: Mapping[int, tuple[bool, ...]] = field(default_factory=dict)

    def sent(self, maker: int, readers: Iterable[int]) -> Places | None:
        """Return the outputs of a stage that some stages read; None for all."""
        found = [self.links.get((maker, reader)) for reader in readers]
        return _joined([None if link is None else link.sent for link in found])

    def returned(self, maker: int, readers: Iterable[int]) -> Places | None:
        """Return the gradients of a stage that some stages read; None for all."""
        found = [self.links.get((reader, maker)) for reader in readers]
        return _joined([None if link is None else link.returned for link in found])

    def wanted(self, stage: int, target: int) -> Places | None:
        """Return which outputs a target's gradients are of; None for all of them."""
        link = self.links.get((stage, target))
        return None if link is None else link.wanted


def _joined(places: Sequence[Places | None]) -> Places | None:
    known = [x for x in places if x is not None]
    if len(known) < len(places):
        return None
    return tuple(sorted({place for x in known for place in x}))


def wire(program: Program, nets: Sequence[NetSetup]) -> Wiring:
    """Find what goes along each flow.

    Where each stage sends to the next alone, and all are trained, that is everything.

    Args:
        program: the whole.
        nets: all of its nets.
    """
    modules = modules_of(program, nets)
    outputs = {net.name: net.output for net in nets if net.output is not None}
    is_chain = program.flows == tuple((s, s + 1) for s in range(program.num_stages - 1))
    if is_chain and not outputs and all(stage.trainable for stage in program.stages):
        return Wiring()
    links: dict[tuple[int, int], FlowValues] = {}
    takes: dict[int, tuple[bool, ...]] = {}
    gives: dict[int, tuple[bool, ...]] = {}
    for number, (stage, module) in enumerate(zip(program.stages, modules, strict=True)):
        is_end = module.index == module.num_stages - 1 and stage.net in outputs
        wants = [value.requires_grad for value in module.outputs]
        gives[number] = tuple(
            flag and stage.trainable
            for flag in (outputs[stage.net].wants_grad if is_end else wants)
        )
        taken: list[bool] = []
        for source, wanted in _inputs(program, modules, outputs, number):
            trained = program.stages[source].trainable and stage.trainable
            flags = [trained and gives[source][place] for place in wanted]
            first = sum(taken)
            taken += flags
            kept = [place for place, flag in zip(wanted, flags, strict=True) if flag]
            giving = [i for i, flag in enumerate(gives[source]) if flag]
            links[source, number] = FlowValues(
                tuple(wanted),
                tuple(range(first, first + len(kept))),
                tuple(giving.index(place) for place in kept),
            )
        takes[number] = tuple(taken)
    return Wiring(links, takes, gives)


def _inputs(
    program: Program,
    modules: Sequence[StageModule],
    outputs: Mapping[str, NetOutput],
    number: int,
) -> Iterable[tuple[int, list[int]]]:
    """Yield each source of a stage, and the places of what comes, in their order."""
    net = program.stages[number].net
    own = [i for i, stage in enumerate(program.stages) if stage.net == net]
    for index, values in modules[number].received.items():
        source = own[index]
        sent = modules[source].outputs
        yield source, [_place(value, sent) for value in values]
    for source in program.sources[number]:
        other = program.stages[source].net
        if other != net:
            yield source, list(range(len(outputs[other].wants_grad)))


def _place(value: Any, among: Sequence[Any]) -> int:
    return next(i for i, other in enumerate(among) if other is value)
