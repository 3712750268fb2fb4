"""Write and read schedules as text, which docs, tests and errors use.

    d0  0F0 0F1 0B0 0B1 0U            a lane: its label, then its ops in order
    d0.1  0W0 0W1                     a second lane of device 0
    d0  0F0 |: 0F0@1 0B0 :| 0B0@1     a flush-free order: the body between the signs

If the program does not follow from the lanes alone, lines before them define it:

    steps 2
    replicas 2
    net teacher microbatches=4
    net student microbatches=4 loss=batch
    stage 0 net=teacher device=0 delay=1 trainable=no follows=1
    stage 1 net=student device=0
    flow 0>1                          with reads=batch: its reader needs all of these
    copies 0 3                        stages that are copies of one another
    repeats 3                         how often the body stands there, if not once

`#` begins a comment. Printing and parsing are each other's inverse.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, TypeVar

from hocket.core.formats.infer import infer_program
from hocket.core.op import Op
from hocket.core.program import Net, Program, Stage
from hocket.core.schedule import Lane, Schedule
from hocket.errors import HocketError, ParseError

_LANE: Final = re.compile(r"d(\d{1,9})(?:\.(\d{1,9}))?", re.ASCII)
_SIGNS: Final = ("|:", ":|")  # around the body
_NUMBER: Final = re.compile(r"\d{1,9}", re.ASCII)
_T = TypeVar("_T")
_PAIR: Final = re.compile(r"([a-z]+)=(\S+)")
_FLOW: Final = re.compile(r"(\d{1,9})>(\d{1,9})", re.ASCII)


def to_text(schedule: Schedule) -> str:
    """Write a schedule as text that `from_text` reads back to an equal one."""
    lines = [] if _follows_from_lanes(schedule) else _header(schedule.program)
    if schedule.num_repeats > 1:
        lines.append(f"repeats {schedule.num_repeats}")
    width = max((len(lane.label) for lane in schedule.lanes), default=0)
    for i, lane in enumerate(schedule.lanes):
        words = [str(op) for op in lane.ops]
        if schedule.body:
            begin, end = schedule.body[i]
            words[end:end] = [":|"]
            words[begin:begin] = ["|:"]
        lines.append(f"{lane.label:<{width}}  {' '.join(words)}".rstrip())
    return "\n".join(lines)


def from_text(text: str, *, path: str = "<text>") -> Schedule:
    """Read a schedule; `path` is named in errors.

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
        draft.lines.setdefault(_subject(words[0]), []).append(number)
    return draft.schedule(path)


def _subject(word: str) -> str:
    """Return what a line is about, by its first word."""
    return "lane" if _LANE.fullmatch(word) else word


def _follows_from_lanes(schedule: Schedule) -> bool:
    try:
        return infer_program(schedule.lanes) == schedule.program
    except HocketError:
        return False


def _header(program: Program) -> list[str]:
    lines = [f"steps {program.num_steps}", f"replicas {program.num_replicas}"]
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
            case ["steps" | "replicas" | "repeats" as name, count]:
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
                    f"steps, replicas, repeats, net, stage, flow or copies; "
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
                program = infer_program(lanes, path=path, lines=self.lines["lane"])
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
