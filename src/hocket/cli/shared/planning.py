"""Loads schedules for `draw`, `simulate` and `check`.

A source is the name of a schedule, for which the options say the sizes; or the path of
a file with a schedule: the text form, or PyTorch's CSV (*.csv).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hocket.cli.shared.options import Sizes
from hocket.errors import PlanError

if TYPE_CHECKING:
    from hocket.core.costs import Costs
    from hocket.core.schedule import Schedule
    from hocket.core.timelines.timeline import Timeline


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
    from hocket.core.formats.given import read_schedule
    from hocket.schedules import SCHEDULES

    if source in SCHEDULES:
        wanted = costs if "costs" in SCHEDULES[source].options else None
        return _made(source, sizes, wanted)
    path = Path(source)
    if not path.exists():
        raise PlanError(_unknown(source, sorted(SCHEDULES)))
    for name in ("devices", "microbatches", "stages_per_device", "replicas"):
        if getattr(sizes, name) is not None:
            option = "--" + name.replace("_", "-")
            raise typer.BadParameter(
                f"{option} is for schedules by name: {source} is a file"
            )
    schedule = read_schedule(path)
    return schedule if sizes.steps is None else schedule.with_num_steps(sizes.steps)


def load_timeline(source: str, sizes: Sizes, costs: Costs) -> Timeline:
    """Return a schedule's simulated timeline, or the one in a JSON file.

    Raises:
        PlanError: see `load_schedule`; or the schedule cannot be simulated.
    """
    from hocket.core.formats.documents import read_text
    from hocket.core.timelines.timeline import Timeline

    if source.endswith(".json") and Path(source).exists():
        return Timeline.from_json(read_text(Path(source)), path=source)
    return simulated(load_schedule(source, sizes, costs), costs)


def simulated(schedule: Schedule, costs: Costs) -> Timeline:
    """Simulate an order; where a body flushes, updates wait for their gate.

    Raises:
        PlanError: the schedule cannot be simulated.
    """
    from hocket.core.gates import gates_of
    from hocket.core.simulate import simulate

    gates = gates_of(schedule, clips=False) if schedule.body else ()
    return simulate(schedule, costs, gates)


def _made(name: str, sizes: Sizes, costs: Costs | None) -> Schedule:
    from hocket.schedules import make_schedule

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
        **({} if costs is None else {"costs": costs}),
    )


def _unknown(source: str, names: list[str]) -> str:
    from hocket.nearest import nearest

    return f"{source!r} is no schedule and no file; {nearest(source, names)}"
