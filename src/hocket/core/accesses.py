"""Define what each op reads and changes in place; no other file does.

`dataflow` speaks of values, each made once. Some of what ops touch is not made but
changed in place, by many ops in turn:

    F          reads weights            changes the buffers (batch-norm statistics)
    B, I       read weights
    B, W                                add to the gradients of their step
    R                                   changes them
    U          reads the gradients      writes the next version of the weights; of a
                                        net that follows another one, and has no delay,
                                        also the buffers

Two ops that touch one thing, of which one changes it, must be ordered by a path of
events. `check` proves that for every order that the events allow; a sanitizer sees it
in the order that was run.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import assert_never

from hocket.core.dataflow import Fact, need_rules
from hocket.core.op import Kind, Op
from hocket.core.program import Program


class Resource(Enum):
    """What ops share and change in place. The text says how errors name it."""

    GRADIENTS = "gradients"  # of a stage's weights, one sum per step
    WEIGHTS = "weights"  # of a stage, one tensor per version
    BUFFERS = "buffers"  # of a stage that moves, such as batch-norm statistics

    __hash__ = object.__hash__  # as in Kind: identity is sound, and fast


@dataclass(frozen=True, slots=True)
class Access:
    """One op's use of a resource.

    Args:
        resource: what is used.
        stage: the stage that owns it.
        number: the step of gradients; of weights, how many updates they have seen; 0
            for buffers.
        writes: whether it is changed.
    """

    resource: Resource
    stage: int
    number: int
    writes: bool

    def __str__(self) -> str:
        """Name what is used as errors do: `gradients[stage 1, step 0]`."""
        match self.resource:
            case Resource.GRADIENTS:
                which = f", step {self.number}"
            case Resource.WEIGHTS:
                which = f", after {self.number} updates"
            case Resource.BUFFERS:
                which = ""
            case _:
                assert_never(self.resource)
        return f"{self.resource.value}[stage {self.stage}{which}]"


@dataclass(frozen=True, slots=True)
class AccessRule:
    """The use of a resource by all ops of some kind and stage.

    Args:
        resource: what is used.
        stage: the stage that owns it.
        writes: whether it is changed.
        shift: its number minus the op's step (never below 0).
        is_numbered: False where all steps use the same (buffers).
    """

    resource: Resource
    stage: int
    writes: bool
    shift: int = 0
    is_numbered: bool = True

    def at(self, step: int) -> Access:
        """Return the access of an op of this step."""
        number = max(0, step + self.shift) if self.is_numbered else 0
        return Access(self.resource, self.stage, number, self.writes)


def accesses(op: Op, program: Program) -> tuple[Access, ...]:
    """Return what `op` reads and changes in place."""
    rules = access_rules(op.kind, op.stage, program)
    return tuple(rule.at(op.step) for rule in rules)


@lru_cache(maxsize=65536)
def access_rules(kind: Kind, stage: int, program: Program) -> tuple[AccessRule, ...]:
    """Return what an op of this kind on this stage reads and changes in place."""
    gradients = AccessRule(Resource.GRADIENTS, stage, writes=True)
    match kind:
        case Kind.FORWARD:
            buffers = AccessRule(Resource.BUFFERS, stage, True, is_numbered=False)
            changed = (buffers,) if program.stages[stage].moves else ()
            return (*_weights_read(kind, stage, program), *changed)
        case Kind.BACKWARD:
            return (*_weights_read(kind, stage, program), gradients)
        case Kind.BACKWARD_INPUT | Kind.UNSHARD:
            return _weights_read(kind, stage, program)
        case Kind.BACKWARD_WEIGHT | Kind.REDUCE:
            return (gradients,)
        case Kind.UPDATE:
            return _update(stage, program)
        case (
            Kind.LOSS
            | Kind.GATHER
            | Kind.RESHARD
            | Kind.SEND_FORWARD
            | Kind.SEND_BACKWARD
            | Kind.RECEIVE_FORWARD
            | Kind.RECEIVE_BACKWARD
        ):
            return ()
        case _:
            assert_never(kind)


def _weights_read(kind: Kind, stage: int, program: Program) -> tuple[AccessRule, ...]:
    return tuple(
        AccessRule(Resource.WEIGHTS, rule.stage, False, rule.shift)
        for rule in need_rules(kind, stage, program)
        if rule.fact is Fact.WEIGHTS
    )


def _update(stage: int, program: Program) -> tuple[AccessRule, ...]:
    """Return what an update reads and overwrites; a follower reads those it follows."""
    facts = program.stages[stage]
    writes = AccessRule(Resource.WEIGHTS, stage, True, 1)
    if facts.trainable:
        return (AccessRule(Resource.GRADIENTS, stage, False), writes)
    read = [AccessRule(Resource.WEIGHTS, s, False, 1) for s in facts.follows]
    if not facts.delay:  # only without one may buffers be copied or averaged
        read.append(AccessRule(Resource.BUFFERS, stage, True, is_numbered=False))
    return (*read, writes)
