"""Define the order of each lane's ops: immutable data that prints and parses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.core.formats.drawn import Drawn
from hocket.core.op import MESSAGES, Op
from hocket.errors import PlanError

if TYPE_CHECKING:
    from hocket.core.program import Program


@dataclass(frozen=True, slots=True)
class Lane:
    """One ordered list of ops: one stream of one device.

    Args:
        device: numbered within one replica.
        stream: 0, unless the device has several lanes.
        ops: in the order in which they start.
        csv_cells: the compute as it stood in PyTorch's CSV, if it was read from there:
            no op for a bubble, two for an overlapped pair. It changes nothing but what
            `to_csv` writes, and is ignored once the ops are others.
    """

    device: int
    stream: int
    ops: tuple[Op, ...]
    csv_cells: tuple[tuple[Op, ...], ...] = field(default=(), compare=False, repr=False)

    @property
    def label(self) -> str:
        """How pictures name it: `d0`, or `d0.1` for a second stream."""
        return f"d{self.device}" + (f".{self.stream}" if self.stream else "")


@dataclass(frozen=True, repr=False)
class Schedule(Drawn):
    """A program and an order of its work.

    Args:
        program: what must be computed.
        lanes: one per device, or one per stream of a device.
        body: for flush-free orders, the range `(begin, end)` of each lane's ops that
            is the repeating body, all its repetitions together; empty for orders that
            finish one step before they begin the next.
        num_repeats: how often the body stands there, once per step.

    >>> from hocket.schedules import make_schedule
    >>> print(make_schedule("1f1b", num_devices=2, num_microbatches=2))
    d0  0F0 0F1 0B0 0B1 0U
    d1  1F0 1B0 1F1 1B1 1U
    """

    program: Program
    lanes: tuple[Lane, ...]
    body: tuple[tuple[int, int], ...] = ()
    num_repeats: int = 0

    def __post_init__(self) -> None:
        """Refuse a body that is not a whole number of repetitions."""
        if not self.body:
            return
        if len(self.body) != len(self.lanes) or self.num_repeats < 1:
            raise PlanError(
                f"a body needs one range per lane and at least one repetition: got "
                f"{len(self.body)} ranges for {len(self.lanes)} lanes, "
                f"{self.num_repeats} repetitions"
            )
        for lane, (begin, end) in zip(self.lanes, self.body, strict=True):
            inside = 0 <= begin <= end <= len(lane.ops)
            if not inside or (end - begin) % self.num_repeats:
                raise PlanError(
                    f"the body of lane {lane.label}, ops {begin} to {end} of "
                    f"{len(lane.ops)}, is not {self.num_repeats} equal repetitions"
                )

    @cached_property
    def num_ops(self) -> int:
        """How many ops all lanes hold together."""
        return sum(len(lane.ops) for lane in self.lanes)

    def lanes_of(self, device: int) -> tuple[int, ...]:
        """Return the indices of a device's lanes."""
        return tuple(i for i, lane in enumerate(self.lanes) if lane.device == device)

    def with_num_steps(self, num_steps: int) -> Schedule:
        """Return the same order for another number of steps.

        A flush-free order has its body repeated more or less often; any other order,
        which must then be of one step, is repeated whole.

        Raises:
            PlanError: fewer steps than prologue and epilogue need, or an order of
                several steps without a body, or one that holds messages, which reach
                from one step into the next.
        """
        if any(op.kind in MESSAGES for lane in self.lanes for op in lane.ops):
            raise PlanError(
                "an order with messages cannot be continued: choose the number of "
                "steps first, then add the messages"
            )
        if self.body:
            return self._with_body_repeated(num_steps)
        if any(stage.delay for stage in self.program.stages):
            raise PlanError(
                f"an order of {self.program.num_steps} steps in which stages read old "
                "weights cannot be continued without a repeating body: make it for "
                "more steps"
            )
        if self.program.num_steps != 1:
            raise PlanError(
                f"an order of {self.program.num_steps} steps without a repeating body "
                "cannot be continued: make it for one step"
            )
        lanes = tuple(
            replace(
                lane,
                ops=tuple(
                    _shifted(op, step) for step in range(num_steps) for op in lane.ops
                ),
            )
            for lane in self.lanes
        )
        return Schedule(replace(self.program, num_steps=num_steps), lanes)

    def _with_body_repeated(self, num_steps: int) -> Schedule:
        more = num_steps - self.program.num_steps
        num_repeats = self.num_repeats + more
        if num_repeats < 1:
            least = self.program.num_steps - self.num_repeats + 1
            raise PlanError(
                f"{num_steps} steps are too few for this flush-free order, whose "
                f"prologue and epilogue leave room for a body from {least} steps on"
            )
        lanes, body = [], []
        for lane, (begin, end) in zip(self.lanes, self.body, strict=True):
            length = (end - begin) // self.num_repeats
            once = lane.ops[begin : begin + length]
            ops = (
                *lane.ops[:begin],
                *(_shifted(op, i) for i in range(num_repeats) for op in once),
                *(_shifted(op, more) for op in lane.ops[end:]),
            )
            lanes.append(replace(lane, ops=ops))
            body.append((begin, begin + length * num_repeats))
        program = replace(self.program, num_steps=num_steps)
        return Schedule(program, tuple(lanes), tuple(body), num_repeats)

    def __repr__(self) -> str:
        """Return one line; `str` is the whole order."""
        program = self.program
        microbatches = "+".join(str(net.num_microbatches) for net in program.nets)
        return (
            f"<hocket.Schedule num_devices={program.num_devices} "
            f"num_stages={program.num_stages} num_microbatches={microbatches} "
            f"num_steps={program.num_steps}>"
        )

    def __str__(self) -> str:
        """The picture, which `parse` reads."""
        from hocket.core.formats.text import to_text

        return to_text(self)

    @classmethod
    def parse(cls, text: str, *, path: str = "<text>") -> Schedule:
        """Read what `str` writes; `path` is named in errors.

        Raises:
            ParseError: with the path, the line and what was expected there.
        """
        from hocket.core.formats.text import from_text

        return from_text(text, path=path)

    def to_csv(self, path: str | Path) -> None:
        """Write the order as PyTorch's CSV, one row per device, for its runtime to run.

        Without messages it is what torch calls "compute_only"; with messages
        (`hocket.passes.add_messages`) it is "compute_comms", each message where torch
        posts it.

        Raises:
            PlanError: the order has several steps, or several lanes on a device,
                which that format cannot hold.
        """
        from hocket.core.formats.torch_csv import to_csv

        Path(path).write_text(to_csv(self), encoding="utf-8")

    @classmethod
    def from_csv(cls, path: str | Path) -> Schedule:
        """Read PyTorch's CSV, leave out its messages, and add updates at the end.

        Raises:
            ParseError: with the path, the line, the cell and what was expected there.
            ScheduleError: an op is there twice, or without the op that belongs to it;
                names all of them, each with its place.
        """
        from hocket.core.formats.given import read_text
        from hocket.core.formats.torch_csv import from_csv

        return from_csv(read_text(Path(path)), path=str(path))


def _shifted(op: Op, num_steps: int) -> Op:
    # A million times in long orders, where dataclasses.replace takes twice as long.
    step = op.step + num_steps
    return Op(op.kind, op.stage, op.microbatch, step, op.peer) if num_steps else op
