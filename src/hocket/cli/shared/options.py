"""Options that several commands share.

    def draw_command(sources, sizes: Sizes, costs: UniformCosts, out)
                                  ▲             ▲
    on the command line:  --devices --steps    --forward --message ...

A command has parameters of the types `Sizes`, `UniformCosts` and `WhatIf`, whose fields
are options; `with_options` passes typer the options in their place.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from inspect import Parameter
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from hocket.core.costs import Costs, Link, StageCost, with_bandwidth, with_slow_device
from hocket.core.formats.costs_json import from_json
from hocket.core.formats.documents import read_text
from hocket.core.formats.given import read_schedule
from hocket.core.gates import gates_of
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.timeline import Timeline
from hocket.errors import PlanError
from hocket.nearest import nearest
from hocket.recipes.run_files import COSTS_NAME
from hocket.schedules import SCHEDULES, make_schedule

# The options of `hocket simulate` that change costs: devices, links, jitter.
#
# --costs run/ --slow rank=1:1.2 --link 0-1:10Gb/s --jitter 0.05
_SLOW: Final = re.compile(r"(?:rank=)?(\d+):(\d+(?:\.\d+)?)")
_LINK: Final = re.compile(r"(\d+)-(\d+):(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(b|B)/s")
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


ScheduleArgument = Annotated[
    str,
    typer.Argument(
        metavar="SCHEDULE",
        help="A schedule's name, or a file: its text, or PyTorch's CSV (*.csv).",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")]


def option(metavar: str, help_: str, *names: str, least: float | None = None) -> Any:
    """Return an option that takes a value.

    Args:
        metavar: what stands for the value in the help.
        help_: what the option is for.
        names: on the command line; the parameter's name where none is given.
        least: the smallest number that it takes.
    """
    return typer.Option(*names, metavar=metavar, min=least, help=help_)


def _finite(seconds: float) -> float:
    """Parse a finite number of seconds."""
    if not isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is no number of seconds")
    return seconds


def _seconds(help_: str) -> Any:
    """Return an option that takes seconds."""
    return typer.Option(metavar="S", min=0.0, callback=_finite, help=help_)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The options that say where costs come from, and what is changed in them."""

    costs_from: Annotated[
        Path | None,
        option(
            "RUN|FILE",
            "The costs that a run has left in its folder, or such a file; instead of "
            "equal devices.",
            "--costs",
        ),
    ] = None
    slow: Annotated[
        list[str] | None,
        option(
            "rank=D:X", "What if device D took X times as long? Such as rank=1:1.2."
        ),
    ] = None
    link: Annotated[
        list[str] | None,
        option(
            "A-B:SPEED", "What if this link had another bandwidth? Such as 0-1:10Gb/s."
        ),
    ] = None
    jitter: Annotated[
        float | None,
        option(
            "X",
            "What if ops took longer or shorter by chance? Their standard deviation "
            "over their mean, such as 0.05.",
        ),
    ] = None

    @property
    def is_asked(self) -> bool:
        """Whether anything is to be changed."""
        return bool(self.slow or self.link) or self.jitter is not None

    def read(self) -> Costs | None:
        """Return the costs of `--costs`, or None without it.

        Raises:
            PlanError: there are none.
            ParseError: they cannot be read.
        """
        if self.costs_from is None:
            return None
        path = self.costs_from
        path = path / COSTS_NAME if path.is_dir() else path
        if not path.exists():
            raise PlanError(
                f"{path} does not exist: `hocket train` leaves {COSTS_NAME} in a run's "
                "folder when the run ends"
            )
        return from_json(read_text(path), path=str(path))

    def changed(self, costs: Costs, program: Program) -> Costs:
        """Return the costs as they would be.

        Raises:
            CostsError: a device or number that cannot be.
            typer.BadParameter: an option that cannot be read.
        """
        for text in self.slow or ():
            found = _SLOW.fullmatch(text)
            if found is None:
                raise typer.BadParameter(f"--slow {text}: write rank=1:1.2")
            device, factor = int(found[1]), float(found[2])
            costs = with_slow_device(costs, program, device, factor)
        for text in self.link or ():
            ends, bytes_per_s = _speed(text)
            costs = with_bandwidth(costs, program, ends, bytes_per_s)
        return costs if self.jitter is None else replace(costs, jitter=self.jitter)


def _speed(text: str) -> tuple[tuple[int, int], float]:
    """Read `0-1:10Gb/s`: two devices, and bits (b) or bytes (B) per second."""
    found = _LINK.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"--link {text}: write 0-1:10Gb/s, or 0-1:1.2GB/s")
    a, b, number, prefix, binary, unit = found.groups()
    size = (1024 if binary else 1000) ** _POWERS[prefix]
    return (int(a), int(b)), float(number) * size / (8 if unit == "b" else 1)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The options that set a schedule's size; None for those not given."""

    devices: Annotated[
        int | None, option("N", "Devices of one replica.", "--devices", "-d")
    ] = None
    microbatches: Annotated[
        int | None, option("N", "Microbatches per step.", "--microbatches", "-m")
    ] = None
    steps: Annotated[
        int | None,
        option(
            "N",
            "Steps, by default 1; of a file, as many as it has. Orders without a flush "
            "are full from 4 on.",
        ),
    ] = None
    stages_per_device: Annotated[
        int | None, option("N", "By default as the schedule is used.")
    ] = None
    replicas: Annotated[
        int | None, option("N", "Copies of the pipeline, by default 1.")
    ] = None
    shards: Annotated[
        int | None,
        option(
            "N", "Devices that hold each stage of a replica together, by default 1."
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class UniformCosts:
    """Costs of equal devices, per microbatch and whole device."""

    forward: Annotated[
        float,
        _seconds("Seconds of one microbatch's forward on a device, in all its stages."),
    ] = 1.0
    input_grad: Annotated[float, _seconds("The same for the input gradient.")] = 1.0
    weight_grad: Annotated[float, _seconds("The same for the weight gradient.")] = 1.0
    update: Annotated[
        float, _seconds("Seconds of a device's update, in all its stages.")
    ] = 0.0
    message: Annotated[float, _seconds("Seconds of a message between devices.")] = 0.0
    message_bytes: Annotated[int, option("N", "Size of each message.", least=0)] = 0
    activation_bytes: Annotated[
        int,
        option(
            "N",
            "Activation bytes of one microbatch on a device; 0 counts microbatches.",
            least=0,
        ),
    ] = 0

    def make(self) -> Costs:
        """Return the simulator's costs."""
        share = StageCost(
            forward_s=self.forward,
            input_grad_s=self.input_grad,
            weight_grad_s=self.weight_grad,
            update_s=self.update,
            output_bytes=self.message_bytes,
            input_grad_bytes=self.message_bytes,
            activation_bytes=self.activation_bytes,
        )
        return Costs((share,), is_device_share=True, link=Link(latency_s=self.message))


_GROUPS: Final = {"sizes": Sizes, "costs": UniformCosts, "what_if": WhatIf}


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options for each of its parameters in `_GROUPS`."""
    own = inspect.signature(command)
    made = {name: _GROUPS[name] for name in own.parameters if name in _GROUPS}

    @functools.wraps(command)
    def called(**given: Any) -> None:
        for name, group in made.items():
            options = inspect.signature(group).parameters
            given[name] = group(**{field: given.pop(field) for field in options})
        command(**given)

    shown = list(_expanded(command))
    # inspect and typing read these instead of the wrapped command's.
    called.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in shown}
    del called.__wrapped__
    return called


def _expanded(command: Callable[..., Any]) -> Iterator[Parameter]:
    """Return a command's parameters, with options in place of grouped ones."""
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if name in _GROUPS:
            yield from _expanded(_GROUPS[name])
        else:
            yield parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY)


# Loads schedules for `draw`, `simulate` and `check`.
#
# A source is the name of a schedule, for which the options say the sizes; or the path
# of a file with a schedule: the text form, or PyTorch's CSV (*.csv).
def load_schedule(source: str, sizes: Sizes, costs: Costs | None = None) -> Schedule:
    """Return the schedule of a name or of a file.

    Args:
        source: a name or a path.
        sizes: the size of a schedule that is given by name.
        costs: the costs for schedules that depend on them; equal times when not given.

    Raises:
        PlanError: there is no such schedule or file; or the numbers do not suit the
            schedule.
        ParseError: the file cannot be read; with its path and line.
        ScheduleError: a CSV whose ops are there twice, or without what belongs to them.
        typer.BadParameter: a name without sizes, or a file with them.
    """
    if source in SCHEDULES:
        wanted = costs if "costs" in SCHEDULES[source].options else None
        return _made(source, sizes, wanted)
    path = Path(source)
    if not path.exists():
        known = nearest(source, sorted(SCHEDULES))
        raise PlanError(f"{source!r} is no schedule and no file; {known}")
    for name in ("devices", "microbatches", "stages_per_device", "replicas", "shards"):
        if getattr(sizes, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise typer.BadParameter(
                f"{flag} is for schedules by name: {source} is a file"
            )
    schedule = read_schedule(path)
    return schedule if sizes.steps is None else schedule.with_num_steps(sizes.steps)


def load_timeline(source: str, sizes: Sizes, costs: Costs) -> Timeline:
    """Return a schedule's simulated timeline, or the one in a JSON file.

    Raises:
        PlanError: see `load_schedule`; or the schedule cannot be simulated.
    """
    if source.endswith(".json") and Path(source).exists():
        return Timeline.from_json(read_text(Path(source)), path=source)
    return simulated(load_schedule(source, sizes, costs), costs)


def simulated(schedule: Schedule, costs: Costs) -> Timeline:
    """Simulate an order; where a body flushes, updates wait for their gate.

    Raises:
        PlanError: the schedule cannot be simulated.
    """
    gates = gates_of(schedule, clips=False) if schedule.body else ()
    return simulate(schedule, costs, gates)


def _made(name: str, sizes: Sizes, costs: Costs | None) -> Schedule:
    if sizes.devices is None or sizes.microbatches is None:
        missing = "--devices" if sizes.devices is None else "--microbatches"
        raise typer.BadParameter(f"schedule {name} needs {missing} N")
    return make_schedule(
        name,
        num_devices=sizes.devices,
        num_microbatches=sizes.microbatches,
        num_steps=1 if sizes.steps is None else sizes.steps,
        num_replicas=1 if sizes.replicas is None else sizes.replicas,
        stages_per_device=sizes.stages_per_device,
        num_shards=1 if sizes.shards is None else sizes.shards,
        **({} if costs is None else {"costs": costs}),
    )
