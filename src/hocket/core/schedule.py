"""Define the order of each lane's ops: immutable data that prints and parses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Final, TypeVar

from hocket.core.formats.documents import read_text
from hocket.core.formats.drawn import Drawn
from hocket.core.formats.infer import infer_program
from hocket.core.op import MESSAGES, Kind, Op
from hocket.core.program import Net, Program, Stage
from hocket.errors import HocketError, ParseError, PlanError


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

    def repetitions(self, lane: int) -> list[int]:
        """Return where repetitions of a lane's body begin, and where the last ends."""
        if not self.body:
            return []
        begin, end = self.body[lane]
        length = (end - begin) // self.num_repeats
        return [begin + i * length for i in range(self.num_repeats + 1)]

    @cached_property
    def num_ops(self) -> int:
        """How many ops all lanes hold together."""
        return sum(len(lane.ops) for lane in self.lanes)

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of its ops."""
        return frozenset(op.kind for lane in self.lanes for op in lane.ops)

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
        if self.kinds & MESSAGES:
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
                    op.later(step) for step in range(num_steps) for op in lane.ops
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
                *(op.later(i) for i in range(num_repeats) for op in once),
                *(op.later(more) for op in lane.ops[end:]),
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
        lines = [] if _follows_from_lanes(self) else _header(self.program)
        if self.num_repeats > 1:
            lines.append(f"repeats {self.num_repeats}")
        width = max((len(lane.label) for lane in self.lanes), default=0)
        for i, lane in enumerate(self.lanes):
            words = [str(op) for op in lane.ops]
            if self.body:
                begin, end = self.body[i]
                words[end:end] = [":|"]
                words[begin:begin] = ["|:"]
            lines.append(f"{lane.label:<{width}}  {' '.join(words)}".rstrip())
        return "\n".join(lines)

    @classmethod
    def parse(cls, text: str, *, path: str = "<text>") -> Schedule:
        """Read what `str` writes; `path` is named in errors.

        Raises:
            ParseError: with the path, the line and what was expected there.
        """
        draft = _Draft()
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.split("#", 1)[0].split()
            if not words:
                continue
            try:
                draft.read(words)
            except HocketError as error:
                raise ParseError(f"{path}, line {number}: {error}") from None
            subject = "lane" if _LANE.fullmatch(words[0]) else words[0]
            draft.lines.setdefault(subject, []).append(number)
        return draft.schedule(path)

    def to_csv(self, path: str | Path) -> None:
        """Write the order as PyTorch's CSV, one row per device, for its runtime to run.

        Without messages it is what torch calls "compute_only"; with messages
        (`hocket.passes.add_messages`) it is "compute_comms", each message where torch
        posts it.

        Raises:
            PlanError: the order has several steps, or several lanes on a device,
                which that format cannot hold.
        """
        Path(path).write_text(type(self).csv().to_csv(self), encoding="utf-8")

    @classmethod
    def from_csv(cls, path: str | Path) -> Schedule:
        """Read PyTorch's CSV, leave out its messages, and add updates at the end.

        Raises:
            ParseError: with the path, the line, the cell and what was expected there.
            ScheduleError: an op is there twice, or without the op that belongs to it;
                names all of them, each with its place.
        """
        read: Schedule = cls.csv().from_csv(read_text(Path(path)), path=str(path))
        return read


# Write and read schedules as text, which docs, tests and errors use.
#
#     d0  0F0 0F1 0B0 0B1 0U            a lane: its label, then its ops in order
#     d0.1  0W0 0W1                     a second lane of device 0
#     d0  0F0 |: 0F0@1 0B0 :| 0B0@1     a flush-free order: the body between the signs
#
# If the program does not follow from the lanes alone, lines before them define it:
#
#     steps 2
#     replicas 2
#     shards 2                          devices that hold a stage of a replica together
#     net teacher microbatches=4
#     net student microbatches=4 loss=batch
#     stage 0 net=teacher device=0 delay=1 trainable=no follows=1
#     stage 1 net=student device=0
#     flow 0>1                          with reads=batch: its reader needs all of these
#     copies 0 3                        stages that are copies of one another
#     repeats 3                         how often the body stands there, if not once
#
# `#` begins a comment. Printing and parsing are each other's inverse.

_LANE: Final = re.compile(r"d(\d{1,9})(?:\.(\d{1,9}))?", re.ASCII)
_SIGNS: Final = ("|:", ":|")  # around the body
_NUMBER: Final = re.compile(r"\d{1,9}", re.ASCII)
_T = TypeVar("_T")
_PAIR: Final = re.compile(r"([a-z]+)=(\S+)")
_FLOW: Final = re.compile(r"(\d{1,9})>(\d{1,9})", re.ASCII)


def _follows_from_lanes(schedule: Schedule) -> bool:
    try:
        return infer_program(_ops(schedule.lanes)) == schedule.program
    except HocketError:
        return False


def _ops(lanes: Iterable[Lane]) -> list[tuple[int, tuple[Op, ...]]]:
    return [(lane.device, lane.ops) for lane in lanes]


def _header(program: Program) -> list[str]:
    lines = [f"steps {program.num_steps}", f"replicas {program.num_replicas}"]
    if program.num_shards > 1:
        lines.append(f"shards {program.num_shards}")
    for net in program.nets:
        loss = " loss=batch" if net.batch_loss else ""
        loss = " loss=replicas" if net.loss_over_replicas else loss
        lines.append(f"net {net.name} microbatches={net.num_microbatches}{loss}")
    for number, stage in enumerate(program.stages):
        words = [f"stage {number} net={stage.net} device={stage.device}"]
        if stage.delay:
            words.append(f"delay={stage.delay}")
        if not stage.trainable:
            words.append("trainable=no")
        if stage.follows:
            words.append(f"follows={','.join(map(str, stage.follows))}")
        lines.append(" ".join(words))
    for flow in program.flows:
        reads = " reads=batch" if flow in program.whole_batch_flows else ""
        lines.append(f"flow {flow[0]}>{flow[1]}{reads}")
    return lines + [f"copies {' '.join(map(str, group))}" for group in program.copies]


@dataclass
class _Draft:
    """What has been read so far, and the lines that said it, by their subject."""

    lanes: list[Lane] = field(default_factory=list)
    body: list[tuple[int, int]] = field(default_factory=list)
    nets: list[Net] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    flows: list[tuple[int, int]] = field(default_factory=list)
    whole_batch_flows: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, ...]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    lines: dict[str, list[int]] = field(default_factory=dict)

    def read(self, words: list[str]) -> None:
        """Read one line."""
        match words:
            case ["steps" | "replicas" | "shards" | "repeats" as name, count]:
                self.counts[name] = _number(count)
            case ["net", name, *pairs]:
                options = _options(pairs, required={"microbatches"}, known={"loss"})
                loss = _choice(options.get("loss", "microbatch"), _LOSSES)
                number = _number(options["microbatches"])
                self.nets.append(Net(name, number, *loss))
            case ["stage", number_text, *pairs]:
                self._read_stage(_number(number_text), pairs)
            case ["copies", *numbers]:
                self.copies.append(tuple(map(_number, numbers)))
            case ["flow", flow, *pairs]:
                self._read_flow(flow, pairs)
            case [label, *ops] if _LANE.fullmatch(label):
                self._read_lane(label, ops)
            case _:
                raise ParseError(
                    "expected a lane (d0 0F0 0B0 ...) or a line that begins with "
                    f"steps, replicas, shards, repeats, net, stage, flow or copies; "
                    f"got {words[0]!r}"
                )

    def _read_flow(self, text: str, pairs: list[str]) -> None:
        match = _FLOW.fullmatch(text)
        if match is None:
            raise ParseError(f"expected a flow like 0>1, got {text!r}")
        flow = int(match[1]), int(match[2])
        self.flows.append(flow)
        options = _options(pairs, required=set(), known={"reads"})
        if _choice(options.get("reads", "microbatch"), _READS_BATCH):
            self.whole_batch_flows.append(flow)

    def _read_stage(self, number: int, pairs: list[str]) -> None:
        if number != len(self.stages):
            raise ParseError(f"expected stage {len(self.stages)}, got stage {number}")
        options = _options(
            pairs, required={"net", "device"}, known={"delay", "trainable", "follows"}
        )
        follows = options.get("follows")
        self.stages.append(
            Stage(
                options["net"],
                _number(options["device"]),
                _choice(options.get("trainable", "yes"), _YES_OR_NO),
                _number(options.get("delay", "0")),
                tuple(map(_number, follows.split(","))) if follows else (),
            )
        )

    def _read_lane(self, label: str, words: list[str]) -> None:
        match = _LANE.fullmatch(label)
        assert match is not None
        signs = tuple(word for word in words if word in _SIGNS)
        if signs:
            if signs != _SIGNS:
                raise ParseError(
                    f"lane {label} needs one |: and one :| around its body"
                )
            self.body.append((words.index("|:"), words.index(":|") - 1))
        ops = tuple(Op.parse(word) for word in words if word not in _SIGNS)
        lane = Lane(int(match[1]), int(match[2] or 0), ops)
        if lane.label in {other.label for other in self.lanes}:
            raise ParseError(
                f"a second lane {lane.label}; write all its ops in one line"
            )
        self.lanes.append(lane)

    def schedule(self, path: str) -> Schedule:
        """Make the schedule from the lines that were read."""
        if not self.lanes:
            last = max(chain([1], *self.lines.values()))
            raise ParseError(
                f"{path}, line {last}: no lanes; expected lines like 'd0  0F0 0B0 0U'"
            )
        lanes = tuple(self.lanes)
        num_repeats = self.counts.get("repeats", 1) if self.body else 0
        self._refuse_what_would_be_ignored(path)
        try:
            if self.stages:
                program = self._program()
            else:
                program = infer_program(
                    _ops(lanes), path=path, lines=self.lines["lane"]
                )
            return Schedule(program, lanes, tuple(self.body), num_repeats)
        except ParseError:
            raise
        except HocketError as error:
            every = sorted(chain(*self.lines.values()))
            where = f"line {every[0]}" + f" to {every[-1]}" * (len(every) > 1)
            raise ParseError(f"{path}, {where}: {error}") from None

    def _refuse_what_would_be_ignored(self, path: str) -> None:
        if "repeats" in self.counts and not self.body:
            raise ParseError(
                f"{path}, line {self.lines['repeats'][0]}: repeats, but no lane marks "
                "its body by |: and :|"
            )
        header = [*self.counts.keys() - {"repeats"}]
        header += ["net"] * bool(self.nets) + ["flow"] * bool(self.flows)
        header += ["copies"] * bool(self.copies)
        if header and not self.stages:
            raise ParseError(
                f"{path}, line {self.lines[min(header)][0]}: a line that begins with "
                f"{min(header)}, but none with stage: name every stage, or leave out "
                "all such lines"
            )

    def _program(self) -> Program:
        return Program(
            tuple(self.nets),
            tuple(self.stages),
            tuple(self.flows),
            self.counts.get("steps", 1),
            self.counts.get("replicas", 1),
            tuple(self.copies),
            frozenset(self.whole_batch_flows),
            self.counts.get("shards", 1),
        )


# The loss is over the whole batch, and over all replicas.
_LOSSES: Final = {
    "microbatch": (False, False),
    "batch": (True, False),
    "replicas": (True, True),
}
_READS_BATCH: Final = {"microbatch": False, "batch": True}
_YES_OR_NO: Final = {"yes": True, "no": False}


def _options(
    pairs: list[str], *, required: set[str], known: set[str]
) -> dict[str, str]:
    options: dict[str, str] = {}
    for pair in pairs:
        match = _PAIR.fullmatch(pair)
        if match is None:
            raise ParseError(f"expected a setting like device=0, got {pair!r}")
        if match[1] not in required | known:
            raise ParseError(
                f"unknown setting {match[1]!r}; known: "
                f"{', '.join(sorted(required | known))}"
            )
        options[match[1]] = match[2]
    missing = required - options.keys()
    if missing:
        raise ParseError(f"expected {min(missing)}=... in this line")
    return options


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ParseError(f"expected a whole number from 0 on, got {text!r}")
    return int(text)


def _choice(text: str, choices: dict[str, _T]) -> _T:
    if text not in choices:
        raise ParseError(f"expected {' or '.join(choices)}, got {text!r}")
    return choices[text]
