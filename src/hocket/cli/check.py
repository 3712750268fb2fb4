"""`hocket check`: checks whether a schedule may run, and why not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from hocket.cli.shared.options import (
    ScheduleArgument,
    Sizes,
    load_schedule,
    option,
    with_options,
)
from hocket.cli.shared.output import sentence
from hocket.core.check import Proof, check
from hocket.core.schedule import Schedule
from hocket.draw.quantity import counted
from hocket.draw.summary import num_microbatches_text
from hocket.errors import ScheduleError


@with_options
def check_command(
    source: ScheduleArgument,
    sizes: Sizes,
    num_buffers: Annotated[
        int | None,
        option(
            "N",
            "Receive buffers per flow that it must get along with.",
            "--buffers",
            least=1,
        ),
    ] = None,
) -> None:
    """Check a schedule: prove that it may run, or say everything wrong with it.

    Ends with 0 if it may run, and with 1 if it must not.
    """
    try:
        schedule = load_schedule(source, sizes)
        proof = check(schedule, num_buffers=num_buffers)
    except ScheduleError as error:
        typer.echo(f"{source}: not ok\n{error}")
        raise typer.Exit(1) from None
    typer.echo("\n".join([f"{source}: ok", *_proved(schedule, proof)]))


def _proved(schedule: Schedule, proof: Proof) -> Iterator[str]:
    """Return what is proved of it, a line each."""
    program = schedule.program
    microbatches = counted(num_microbatches_text(program), "microbatch")
    yield from sentence(
        f"{counted(schedule.num_ops, 'op')}: all that {microbatches} need on "
        f"{counted(program.num_stages, 'stage')} of "
        f"{counted(program.num_devices, 'device')} in "
        f"{counted(program.num_steps, 'step')}, each once",
        "  ",
    )
    yield from sentence(
        "no lane waits for ever, even where a send waits for its receiver, with "
        f"{counted(proof.num_buffers, 'receive buffer')} per flow",
        "  ",
    )
    yield from sentence(
        "every forward and its backward read the weights that the delays promise: "
        f"at most {counted(max(proof.num_versions), 'version')} of a stage's alive",
        "  ",
    )
