"""The command `hocket`: its subcommands, and how errors end them.

`hocket --help` must answer at once, so that a command's module is imported only when
that command is called; until then its line in `COMMANDS` represents it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from hocket.env import ExitCode, exit_code_of
from hocket.errors import HocketError
from hocket.version import __version__

# Each with its first line of help; `hocket.cli.NAME` holds the function `NAME_command`.
COMMANDS: Final = {
    "train": "Train a recipe on local workers, or as one of torchrun's.",
    "plan": "Plan: every way to train a recipe on so many devices, the best first.",
    "profile": "Measure a recipe's model, layer by layer.",
    "draw": "Draw schedules, or timelines, as text, SVG, HTML or Perfetto traces.",
    "simulate": (
        "Simulate a schedule: makespan, idle time by cause, memory and bytes sent."
    ),
    "search": (
        "Search for the best order of a schedule's work, and prove how good it is."
    ),
    "compare": "Compare two runs: settings, losses, step time by cause, memory.",
    "share": "Train several recipes on one device at the same time.",
    "bench": "Show a published experiment, simulated and measured, beside its source.",
    "check": (
        "Check a schedule: prove that it may run, or say everything wrong with it."
    ),
    "checkpoint": ("Look at checkpoints, verify every byte of them, export weights."),
    "doctor": "Check this machine, or all hosts of a job, for what stops people.",
}


class LazyCommand(TyperCommand):
    """A command whose module is imported when it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name, help=COMMANDS[name])

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Return the real command's context."""
        return self.load().make_context(*args, **kwargs)

    def load(self) -> Any:
        """Import the real command."""
        module = import_module(f"hocket.cli.{self.name}")
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(self.name)(getattr(module, f"{self.name}_command"))
        return typer.main.get_command(alone)


class Commands(TyperGroup):
    """All commands. Turns hocket's own errors into a message and an exit code."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name in COMMANDS:
            self.add_command(LazyCommand(name))

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of `COMMANDS`, not of the alphabet."""
        return list(COMMANDS)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; print only the message of hocket's own errors."""
        try:
            return super().invoke(ctx)
        except HocketError as error:
            if ctx.params["debug"]:
                raise
            print(f"hocket: {error}", file=sys.stderr)
            raise typer.Exit(exit_code_of(error)) from error
        except KeyboardInterrupt as error:
            print(f"hocket: {str(error) or 'interrupted'}", file=sys.stderr)
            raise typer.Exit(ExitCode.INTERRUPTED) from error


app = typer.Typer(
    cls=Commands,
    name="hocket",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"hocket {__version__}")
        raise typer.Exit


@app.callback()
def main(
    debug: bool = typer.Option(False, "--debug", help="Show errors with tracebacks."),
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version.",
    ),
) -> None:
    """Decides, checks, predicts and runs the order of work in training."""
