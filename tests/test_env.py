"""The environment: read in one place, and errors that name what is wrong in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket import env, errors
from hocket.env import TIMEOUT_S, WORLD_SIZE, ExitCode, Variable, exit_code_of
from hocket.errors import HocketError, RunError, WorkerError

SOURCE = Path(__file__).parent.parent / "src"


def test_the_documented_variables_are_those_that_are_read() -> None:
    """The environment is read in env.py alone, so its table is complete.

    Guards compare it where a forward of the user's reads it (`reached.py`).
    """
    readers = {
        path.name
        for path in SOURCE.rglob("*.py")
        if "os.environ" in path.read_text() or "getenv" in path.read_text()
    }
    assert readers == {"env.py", "reached.py"}
    variables = [value for value in vars(env).values() if isinstance(value, Variable)]
    variables.extend(env.MALLOC)
    names = [variable.name for variable in variables]
    assert len(names) == len(set(names)) > 20
    assert all(variable.meaning for variable in variables)


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan", "inf"])
def test_seconds_are_positive(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero would give up at once, infinity never."""
    monkeypatch.setenv("HOCKET_TIMEOUT_S", text)
    with pytest.raises(RunError, match=f"HOCKET_TIMEOUT_S='{text}' must be a positive"):
        TIMEOUT_S.seconds()


def test_integers_have_no_silent_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of workers that is not given is not 0."""
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(RunError, match="WORLD_SIZE='two' must be a whole number"):
        WORLD_SIZE.integer()
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(RunError, match="WORLD_SIZE='' must be a whole number"):
        WORLD_SIZE.integer()


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """`HOCKET_TIMEOUT_S= hocket train ...` is how a shell clears one."""
    monkeypatch.setenv("HOCKET_TIMEOUT_S", "")
    assert TIMEOUT_S.seconds() == 60.0


def test_no_failure_ends_with_success() -> None:
    """Whatever error ends a process, its exit code says so."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in set(kinds) - {WorkerError}:  # which brings its own
        assert issubclass(kind, HocketError)
        assert exit_code_of(kind.__new__(kind)) is not ExitCode.OK
    assert exit_code_of(errors.WaitError("")) is ExitCode.HANG
    assert exit_code_of(errors.ShapeError("")) is ExitCode.PLAN
    assert exit_code_of(WorkerError("", rank=0, exit_code=5)) is ExitCode.NON_FINITE
    assert exit_code_of(ValueError()) is ExitCode.WORKER
