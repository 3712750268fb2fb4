"""How values come to a stage's ops of one kind, and where they go from there.

    from another device's lane ──▶ │      │ ──▶ to another device's lane
                                   │  op  │
      left by an op of this lane ─▶│      │ ──▶ left for an op of this lane

Which of them it is does not change from step to step, so it is found out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from hocket.core.op import Kind
from hocket.core.program import Program
from hocket.run.comm.step_header import Step
from hocket.run.diagnostics.flight_recorder import Ring
from hocket.run.engine.point_to_point import Mail

Values: TypeAlias = tuple[Tensor, ...]
Left: TypeAlias = dict[tuple[Kind, int], dict[tuple[int, int], Values]]


class Handover:
    """The ways into and out of one stage, forward or back.

    Args:
        kind: `FORWARD` for outputs, `BACKWARD` for gradients.
        stage: on this device.
        program: says who is next.
        mail: to and from other devices.
        left: what ops of this lane left for its other ops, by kind and stage, and then
            by step and microbatch.
        ring: told when a wait is over.
        keeps: whether the input stays valid when the op has ended, until `release`.

    Attributes:
        receives: whether the input comes from another device.
    """

    def __init__(
        self,
        kind: Kind,
        stage: int,
        program: Program,
        mail: Mail,
        left: Left,
        ring: Ring,
        *,
        keeps: bool,
    ) -> None:
        self._kind = kind
        self._stage = stage
        self._mail = mail
        self._ring = ring
        self.receives = mail.receives(kind, stage)
        self._left = left.setdefault((kind, stage), {})
        others = _following(kind, stage, program)
        self._sends = bool(others) and mail.sends(kind, stage)
        near = [] if self._sends else others
        self._next = [left.setdefault((kind, other), {}) for other in near]
        # What a stage only hands on lies in the buffer that its input came in.
        self._copies = self.receives and bool(near) and not keeps

    def take(self, step: Step, index: int) -> Sequence[Tensor]:
        """What the stages before (F) or after (B) made for a microbatch."""
        if not self.receives:
            return self._left.pop((step.number, index), ())
        values = self._mail.receive(self._kind, self._stage, step, index)
        self._ring.resume()
        return values

    def give(self, step: Step, index: int, values: Values) -> None:
        """What an op made, to whoever needs it; nothing happens where nobody does."""
        if self._sends:
            self._mail.send(self._kind, self._stage, step, index, values)
            return
        if self._copies:
            values = tuple(value.clone() for value in values)
        for place in self._next:
            place[step.number, index] = values

    def release(self, step: Step, index: int) -> None:
        """A microbatch's input is no longer needed."""
        if self.receives:
            self._mail.release(self._kind, self._stage, step, index)


def _following(kind: Kind, stage: int, program: Program) -> list[int]:
    """The stages that need what this one makes."""
    if kind is Kind.FORWARD:
        return list(program.targets[stage])
    return [s for s in program.sources[stage] if program.stages[s].trainable]
