"""Read an order from a file, and compare its sizes with the wanted ones."""

from __future__ import annotations

from pathlib import Path

from hocket.core.formats.documents import read_text
from hocket.core.formats.torch_csv import from_csv
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.errors import ShapeError


def is_path(source: str | Path) -> bool:
    """Return whether a schedule's source is a file, and not a name.

    >>> is_path("zb-v"), is_path("zb-v.csv"), is_path("orders/best")
    (False, True, True)
    """
    if isinstance(source, Path):
        return True
    return "/" in source or source.endswith((".csv", ".txt"))


def read_schedule(
    path: Path, *, num_replicas: int = 1, num_shards: int = 1
) -> Schedule:
    """Read a file's order: PyTorch's CSV (*.csv), or the text form.

    Args:
        path: the file's path.
        num_replicas: the replicas of an order as CSV, which does not hold them.
        num_shards: the devices that hold each of its stages together, nor these.

    Raises:
        ParseError: the file cannot be read; names its path, and the line.
        ScheduleError: an op is there twice, or without the op that belongs to it.
    """
    text = read_text(path)
    if path.suffix == ".csv":
        return from_csv(
            text, path=str(path), num_replicas=num_replicas, num_shards=num_shards
        )
    return Schedule.parse(text, path=str(path))


def refuse_other_sizes(
    program: Program,
    *,
    num_devices: int,
    num_microbatches: int,
    num_replicas: int,
    num_shards: int = 1,
    has_body: bool = False,
) -> None:
    """Check that an order is of one net and of these sizes.

    It must be of one step, unless it has a body.

    Raises:
        ShapeError: it is not; names the sizes of both.
    """
    num_given = program.nets[0].num_microbatches
    num_steps = program.num_steps if has_body else 1
    sizes = (
        (program.num_devices, "devices", num_devices, "one worker for each"),
        (
            num_given,
            "microbatches",
            num_microbatches,
            f"num_microbatches={num_given} fits it",
        ),
        (
            program.num_steps,
            "steps",
            num_steps,
            "one is enough, or some with a body between |: and :|",
        ),
        (program.num_replicas, "replicas", num_replicas, "num_replicas"),
        (program.num_shards, "shards", num_shards, "num_shards"),
        (len(program.nets), "nets", 1, "a pipeline has one"),
    )
    others = [
        f"{given} {name}, not {wanted} ({way})"
        for given, name, wanted, way in sizes
        if given != wanted
    ]
    if others:
        raise ShapeError(
            "the schedule given has other sizes than this pipeline: "
            + ", and ".join(others)
        )
