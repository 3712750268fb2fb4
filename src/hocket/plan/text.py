"""The text form of schedules: docs, tests, errors and bug reports all use it.

    d0  0F0 0F1 0B0 0B1 0U            a lane: its label, then its ops in order
    d0.1  0W0 0W1                     a second lane of device 0
    d0  0F0 |: 0F0@1 0B0 :| 0B0@1     a flush-free order: the body between the signs

Where the lanes alone do not tell the program, lines before them do:

    steps 2
    replicas 2
    repeats 3
    net student microbatches=4 loss=batch
    stage 0 net=student device=0 delay=1
    stage 1 net=teacher device=0 trainable=no follows=0
    flow 1>0

`#` begins a comment. Printing and parsing are each other's inverse.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hocket.errors import HocketError, ParseError
from hocket.plan.infer import infer_program
from hocket.plan.op import Op
from hocket.plan.program import Net, Program, Stage
from hocket.plan.schedule import Lane, Schedule

_LANE = re.compile(r"d(\d{1,9})(?:\.(\d{1,9}))?")


def to_text(schedule: Schedule) -> str:
    """Write a schedule as text that `from_text` reads back to an equal one."""
    lines = [] if _is_told_by_lanes(schedule) else _header(schedule.program)
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
        except (HocketError, ValueError, KeyError) as error:
            reason = error if isinstance(error, HocketError) else f"cannot read {line!r}"
            raise ParseError(f"{path}, line {number}: {reason}") from None
    return draft.schedule(path)


def _is_told_by_lanes(schedule: Schedule) -> bool:
    try:
        return infer_program(schedule.lanes) == schedule.program
    except HocketError:
        return False


def _header(program: Program) -> list[str]:
    lines = [f"steps {program.num_steps}", f"replicas {program.num_replicas}"]
    for net in program.nets:
        loss = " loss=batch" if net.batch_loss else ""
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
    return lines + [f"flow {a}>{b}" for a, b in program.flows]


@dataclass
class _Draft:
    """What has been read so far."""

    lanes: list[Lane] = field(default_factory=list)
    body: list[tuple[int, int]] = field(default_factory=list)
    nets: list[Net] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    flows: list[tuple[int, int]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def read(self, words: list[str]) -> None:
        """Take in one line."""
        match words:
            case ["steps" | "replicas" | "repeats" as name, count]:
                self.counts[name] = int(count)
            case ["net", name, *pairs]:
                options = _options(pairs, {"microbatches", "loss"})
                batch_loss = options.get("loss") == "batch"
                self.nets.append(Net(name, int(options["microbatches"]), batch_loss))
            case ["stage", number, *pairs]:
                self._read_stage(int(number), pairs)
            case ["flow", flow]:
                from_stage, to_stage = flow.split(">")
                self.flows.append((int(from_stage), int(to_stage)))
            case [label, *ops] if _LANE.fullmatch(label):
                self._read_lane(label, ops)
            case _:
                raise ParseError(
                    f"expected a lane (d0 0F0 0B0 ...) or a line that begins with "
                    f"steps, replicas, repeats, net, stage or flow; got {words[0]!r}"
                )

    def _read_stage(self, number: int, pairs: list[str]) -> None:
        if number != len(self.stages):
            raise ParseError(f"expected stage {len(self.stages)}, got stage {number}")
        options = _options(pairs, {"net", "device", "delay", "trainable", "follows"})
        follows = tuple(int(s) for s in options.get("follows", "").split(",") if s)
        self.stages.append(
            Stage(
                options["net"],
                int(options["device"]),
                options.get("trainable", "yes") == "yes",
                int(options.get("delay", "0")),
                follows,
            )
        )

    def _read_lane(self, label: str, words: list[str]) -> None:
        match = _LANE.fullmatch(label)
        assert match is not None
        if "|:" in words or ":|" in words:
            if words.count("|:") != 1 or words.count(":|") != 1:
                raise ParseError(f"lane {label} needs one |: and one :| around its body")
            self.body.append((words.index("|:"), words.index(":|") - 1))
        ops = tuple(Op.parse(word) for word in words if word not in ("|:", ":|"))
        self.lanes.append(Lane(int(match[1]), int(match[2] or 0), ops))

    def schedule(self, path: str) -> Schedule:
        """Put what was read together."""
        if not self.lanes:
            raise ParseError(f"{path}: no lanes; expected lines like 'd0  0F0 0B0 0U'")
        lanes = tuple(self.lanes)
        num_repeats = self.counts.get("repeats", 1) if self.body else 0
        try:
            program = self._program() if self.stages else infer_program(lanes, path=path)
            return Schedule(program, lanes, tuple(self.body), num_repeats)
        except ParseError:
            raise
        except HocketError as error:
            raise ParseError(f"{path}: {error}") from None

    def _program(self) -> Program:
        return Program(
            tuple(self.nets),
            tuple(self.stages),
            tuple(self.flows),
            self.counts.get("steps", 1),
            self.counts.get("replicas", 1),
        )


def _options(pairs: list[str], known: set[str]) -> dict[str, str]:
    options = dict(pair.split("=", 1) for pair in pairs)
    unknown = set(options) - known
    if unknown:
        raise ParseError(
            f"unknown setting {', '.join(sorted(unknown))}; known: "
            f"{', '.join(sorted(known))}"
        )
    return options
