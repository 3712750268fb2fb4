"""`hocket` answers at once, knows its commands, and ends with the right exit code."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest
from typer.testing import CliRunner

import hocket as package
from hocket.cli.main import COMMANDS, LazyCommand, app
from hocket.env import ExitCode
from hocket.errors import (
    DataError,
    HocketError,
    NonFiniteError,
    RecipeError,
    ShapeError,
    WaitError,
    WorkerError,
)
from tests.cli.shell import hocket

HELP_SECONDS: Final = 0.3
TRIES: Final = 50

HEAVY: Final = ("torch", "numpy", "jinja2", "pydantic", "rich")

ERRORS: Final = [
    (RecipeError("why"), 2),
    (DataError("why"), 2),
    (ShapeError("why"), 3),
    (NonFiniteError("why"), 5),
    (WaitError("why"), 6),
    (WorkerError("why", 1, ExitCode.WORKER), 7),
    (WorkerError("why", 1, ExitCode.NON_FINITE), 5),
]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """A command `fail` that raises what the list holds."""
    errors: list[BaseException] = []

    def fail_command() -> None:
        """Fail."""
        raise errors[0]

    module = ModuleType("hocket.cli.fail")
    module.fail_command = fail_command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(COMMANDS, "fail", "Fail.")
    return errors


def test_help_answers_at_once(tmp_path: Path) -> None:
    """0.3 s with Python's own start, and every command is in it.

    One of many tries, because another process may hold the cores during any of them.
    """
    for _ in range(TRIES):
        begin_s = time.perf_counter()
        done = hocket("--help", cwd=tmp_path)
        seconds = time.perf_counter() - begin_s
        assert done.returncode == 0
        assert not done.stderr
        assert all(f"  {name} " in done.stdout for name in COMMANDS)
        if seconds < HELP_SECONDS:
            return
    raise AssertionError(f"`hocket --help` took {seconds} s")


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    """The reason why it is fast, and stays so."""
    done = hocket("--help", cwd=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "hocket.cli.main" in imported
    assert not imported & set(HEAVY)


def test_version(tmp_path: Path) -> None:
    """The package's."""
    done = hocket("--version", cwd=tmp_path)
    assert done.stdout == f"hocket {package.__version__}\n"
    assert done.returncode == 0


def test_an_unknown_command_names_the_nearest(tmp_path: Path) -> None:
    """`trian` is `train`; exit code 2, as for all that is not valid."""
    done = hocket("trian", cwd=tmp_path)
    assert done.returncode == ExitCode.USAGE
    assert "Did you mean 'train'?" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_what_its_line_says(name: str) -> None:
    """The line that stands for a command is the first one of its own help."""
    command = LazyCommand(name).load()
    assert command.help.partition("\n")[0] == COMMANDS[name]
    assert command.name == name


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(name: str) -> None:
    """Under its own name."""
    result = CliRunner().invoke(app, [name, "--help"], prog_name="hocket")
    assert result.exit_code == 0
    assert f"Usage: hocket {name}" in result.output


@pytest.mark.parametrize(("error", "code"), ERRORS)
def test_our_errors_are_a_message_and_an_exit_code(
    failing: list[BaseException], error: HocketError, code: int
) -> None:
    """No traceback: the message has all that there is to know."""
    failing.append(error)
    result = CliRunner().invoke(app, ["fail"])
    assert result.exit_code == code
    assert result.stderr == "hocket: why\n"
    assert not result.stdout


def test_debug_shows_the_traceback(failing: list[BaseException]) -> None:
    """The option shows where the error came from."""
    failing.append(DataError("why"))
    result = CliRunner().invoke(app, ["--debug", "fail"])
    assert isinstance(result.exception, DataError)


def test_other_errors_are_not_hidden(failing: list[BaseException]) -> None:
    """A mistake of ours keeps its traceback."""
    failing.append(ZeroDivisionError())
    assert isinstance(CliRunner().invoke(app, ["fail"]).exception, ZeroDivisionError)


def test_an_interrupt_ends_cleanly(failing: list[BaseException]) -> None:
    """Ctrl-C: the code that shells give, and where the workers stood if it is known."""
    failing.append(KeyboardInterrupt("stopped by SIGINT: rank 0 at step 3 in 0F1"))
    result = CliRunner().invoke(app, ["fail"])
    assert result.exit_code == ExitCode.INTERRUPTED
    assert result.stderr == "hocket: stopped by SIGINT: rank 0 at step 3 in 0F1\n"
