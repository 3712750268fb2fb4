"""Define one unit of work, and the closed list of kinds of work."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from hocket.errors import ParseError


class Kind(Enum):
    """What an op does. The value is its letter in text (PyTorch's letters)."""

    # compute, once per microbatch
    FORWARD = "F"
    BACKWARD = "B"  # I and W below at once
    BACKWARD_INPUT = "I"  # dL/dx: the stage before is waiting for it
    BACKWARD_WEIGHT = "W"  # dL/dw: no op waits for it before R or U

    # once per step
    LOSS = "L"  # a loss over the whole batch
    GATHER = "G"  # gather the stage's outputs over replicas, without gradient
    REDUCE = "R"  # sum the stage's gradients over replicas and copies
    UPDATE = "U"  # the optimizer's step, or a teacher's momentum update

    # of sharded stages, added by a pass; the number counts the stage's in the step
    UNSHARD = "UNSHARD"  # gather the whole weights from the shards
    RESHARD = "RESHARD"  # release what was gathered

    # messages, added by a pass
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"

    # Members are singletons, so identity is a sound hash, and ten times faster than
    # Enum's own, which hashes the name in Python. Plans hash ops by the million.
    __hash__ = object.__hash__


ONCE_PER_STEP: Final = frozenset({Kind.LOSS, Kind.GATHER, Kind.REDUCE, Kind.UPDATE})
BACKWARDS: Final = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})
SPLIT_BACKWARD: Final = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
WHOLE_OR_SPLIT_BACKWARD: Final = frozenset({Kind.BACKWARD, *SPLIT_BACKWARD})
SENDS: Final = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES: Final = frozenset({Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD})
MESSAGES: Final = SENDS | RECEIVES
MAKES_WEIGHT_GRAD: Final = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})
SHARDING: Final = frozenset({Kind.UNSHARD, Kind.RESHARD})
# A loss may have weights of its own, which are a part of the last stage.
READS_WEIGHTS: Final = WHOLE_OR_SPLIT_BACKWARD | {Kind.FORWARD, Kind.LOSS}
COLLECTIVES: Final = frozenset({Kind.GATHER, Kind.REDUCE, Kind.UNSHARD})
STEP_ENDS: Final = frozenset({Kind.REDUCE, Kind.UPDATE})

# Ops that only start something: the lane goes on at once, others wait for the result.
ASYNCHRONOUS: Final = MESSAGES | COLLECTIVES


@dataclass(frozen=True, slots=True)
class Op:
    """One kind of work, on one stage, for one microbatch of one step.

    Written `2F0` (stage 2, forward, microbatch 0), `2F0@3` in step 3, `2U` and `2U@3`
    for work done once per step. Messages name the stage at the other end:
    `0SEND_F1>1` goes from stage 0 to stage 1, `1RECV_F1<0` is its arrival there.

    >>> Op(Kind.FORWARD, 2, 0), Op.parse("0SEND_F1>1@2").peer
    (2F0, 1)
    """

    kind: Kind
    stage: int
    microbatch: int | None = None  # None for the kinds done once per step
    step: int = 0
    peer: int | None = None  # messages only: the stage at the other end

    def __str__(self) -> str:
        """Write the op as in pictures, CSV files and errors."""
        microbatch = "" if self.microbatch is None else self.microbatch
        peer = ""
        if self.peer is not None:
            peer = f"{'>' if self.kind in SENDS else '<'}{self.peer}"
        step = f"@{self.step}" if self.step else ""
        return f"{self.stage}{self.kind.value}{microbatch}{peer}{step}"

    __repr__ = __str__

    def as_kind(self, kind: Kind) -> Op:
        """Return the op of another kind with the same numbers."""
        return Op(kind, self.stage, self.microbatch, self.step, self.peer)

    def later(self, num_steps: int) -> Op:
        """Return the same op so many steps later."""
        # A million times in long orders, where dataclasses.replace takes twice as long.
        if not num_steps:
            return self
        step = self.step + num_steps
        return Op(self.kind, self.stage, self.microbatch, step, self.peer)

    @classmethod
    def parse(cls, text: str) -> Op:
        """Read what `str` writes.

        Raises:
            ParseError: the text is not an op; it says what is expected.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ParseError(
                f"{text!r} is not an op; one looks like 2F0, 2U, 2B0@1 or 0SEND_F1>1, "
                f"with a kind among {' '.join(kind.value for kind in Kind)}"
            )
        stage, letters, microbatch, arrow, peer, step = match.groups()
        kind = Kind(letters)
        if (microbatch is None) != (kind in ONCE_PER_STEP):
            need = "takes no" if kind in ONCE_PER_STEP else "needs a"
            raise ParseError(f"{text!r}: {kind.value} {need} microbatch number")
        expected = ">" if kind in SENDS else "<" if kind in RECEIVES else None
        if arrow != expected:
            raise ParseError(
                f"{text!r}: messages name the other stage (0SEND_F1>1, 1RECV_F1<0), "
                "other ops do not"
            )
        return cls(
            kind,
            int(stage),
            None if microbatch is None else int(microbatch),
            int(step or 0),
            None if peer is None else int(peer),
        )


_PATTERN: Final = re.compile(
    r"(\d{1,9})"
    rf"({'|'.join(sorted((k.value for k in Kind), key=len, reverse=True))})"
    r"(\d{1,9})?(?:([<>])(\d{1,9}))?(?:@(\d{1,9}))?",
    re.ASCII,  # no other script's digits, which would be printed as these
)
