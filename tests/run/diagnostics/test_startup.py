"""What a pipeline does before its first step is reported, if that takes long."""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Event
from typing import Any, Final

import pytest
import torch
from torch import nn

import hocket
from hocket.errors import ConfigError
from hocket.run.diagnostics import startup
from hocket.run.diagnostics.startup import StartupHook, StartupProgress, StartupReporter
from tests.run.support.forked_python import run_forked_python
from tests.run.support.started import started

LONG_S = 600.0
BATCH = torch.ones(4, 3), torch.zeros(4, 3)


@pytest.fixture(autouse=True)
def _waits_for_the_last_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, too; and repeats none."""
    monkeypatch.setattr(startup, "EVERY_S", LONG_S)
    monkeypatch.setattr(startup, "END_S", LONG_S)


def reporter(
    hook: StartupHook | None, *, is_leader: bool = True, after_s: float = 0.0
) -> StartupReporter:
    """Whose first report is due so many seconds after its beginning."""
    return StartupReporter(hook, is_leader=is_leader, after_s=after_s)


def pipeline(**options: Any) -> hocket.Pipeline:
    """Of one device."""
    return started(
        nn.Sequential(nn.Linear(3, 3)),
        nn.functional.mse_loss,
        torch.optim.SGD,
        BATCH,
        **options,
    )


def test_each_activity_is_reported_when_it_begins() -> None:
    """Once, with its count and the seconds so far; a count alone is not."""
    seen: list[StartupProgress] = []
    with reporter(seen.append) as report:
        report(StartupProgress("capturing"))
        report(StartupProgress("choosing", 0.0, 1, 10))
        report(StartupProgress("choosing", 0.0, 2, 10))
        report(StartupProgress("dry run"))
    report(StartupProgress("too late"))

    reported = [(x.what, x.num_done, x.num_all) for x in seen]
    first = reported[0]
    assert first == ("capturing", None, None)
    assert ("choosing", 1, 10) in reported
    assert reported[-1][0] == "dry run"
    seconds = [x.seconds for x in seen]
    assert seconds == sorted(seconds)


def test_a_long_activity_is_reported_while_it_lasts() -> None:
    """By a thread: the one that captures a model is in the middle of it."""
    reported = Event()
    with reporter(lambda _: reported.set(), after_s=0.01) as report:
        report(StartupProgress("capturing"))
        assert reported.wait(30.0)


def test_a_hook_that_hangs_does_not_hold_up_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is in the middle of a call when the pipeline is ready."""
    monkeypatch.setattr(startup, "END_S", 0.0)
    called, goes_on = Event(), Event()
    seen: list[str] = []

    def hangs(progress: StartupProgress) -> None:
        seen.append(progress.what)
        called.set()
        goes_on.wait(LONG_S)

    with reporter(hangs) as report:
        report(StartupProgress("capturing"))
        assert called.wait(30.0)
        report(StartupProgress("dry run"))
    assert not goes_on.is_set()
    goes_on.set()
    report._thread.join(30.0)
    assert not report._thread.is_alive()
    assert seen == ["capturing"]


@pytest.mark.parametrize(
    ("is_leader", "after_s"), [(True, LONG_S), (False, 0.0)], ids=["soon", "rank 1"]
)
def test_nothing_is_said_of_a_quick_start_or_by_others(
    caplog: pytest.LogCaptureFixture, is_leader: bool, after_s: float
) -> None:
    """Neither to the hook nor to the log."""
    caplog.set_level(logging.INFO, "hocket")
    seen: list[StartupProgress] = []
    with reporter(seen.append, is_leader=is_leader, after_s=after_s) as report:
        report(StartupProgress("capturing"))
    assert not seen
    assert not caplog.records


def test_a_pipeline_reports_and_goes_on_without_a_hook_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has all that is done, and the hook's traceback once."""
    monkeypatch.setattr(startup, "AFTER_S", 0.0)
    caplog.set_level(logging.INFO, "hocket")
    calls: list[str] = []

    def fails(progress: StartupProgress) -> None:
        calls.append(progress.what)
        raise OSError("no widget")

    with pipeline(progress=fails) as made:
        assert made.step(BATCH).step == 0

    assert len(calls) == 1
    lines = [x.getMessage() for x in caplog.records if x.name == "hocket"]
    for what in (
        "capturing the model",
        "measuring the model's layers",
        "measuring updates",
        "a dry run of a few steps",
    ):
        assert any(line.startswith(f"{what} (") for line in lines)
    (failure,) = [x for x in caplog.records if x.levelno == logging.ERROR]
    assert "progress= failed at" in failure.getMessage()
    assert failure.exc_info is not None


UNHEARD: Final = """
import sys, logging, torch, hocket
from torch import nn
from hocket.run.diagnostics import startup

if __name__ == "__main__":
    startup.AFTER_S = 0.0
    exec(sys.argv[1])
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    loss = nn.functional.mse_loss
    batch = torch.ones(4, 3), torch.zeros(4, 3)
    hocket.Pipeline(
        model, loss, optimizer=torch.optim.SGD, example=batch, num_microbatches=2
    ).close()
    print("plan:", file=sys.stderr)
    hocket.plan(model, batch, loss, num_devices=1, hardware="v100-32g")
"""


@pytest.mark.parametrize(
    ("lines", "is_said"),
    [
        ("pass", True),
        ("logging.getLogger('hocket').setLevel('WARNING')", False),
        ("logging.basicConfig(level='ERROR')", False),
    ],
    ids=["no logging", "silenced", "logging of the script's"],
)
def test_a_start_is_said_where_no_logging_is_set_up(
    tmp_path: Path, lines: str, is_said: bool
) -> None:
    """A start of minutes without a word looked like one that hangs."""
    (tmp_path / "script.py").write_text(UNHEARD)
    done = run_forked_python([str(tmp_path / "script.py"), lines], tmp_path)
    assert done.returncode == 0, done.stderr
    made, _, planned = done.stderr.partition("plan:")
    assert ("hocket: a dry run of a few steps (" in made) == is_said
    assert ("hocket: capturing and measuring the model (" in planned) == is_said
    assert ("hocket: " in done.stderr) == is_said


def test_the_net_of_fill_is_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is measured: this order cannot be filled."""
    monkeypatch.setattr(startup, "AFTER_S", 0.0)
    seen: list[str] = []
    net = nn.Linear(3, 3).eval()
    with pytest.raises(ConfigError, match="fill: steps of schedule 'pipedream-2bw'"):
        pipeline(
            schedule="pipedream-2bw",
            fill=hocket.Fill(net, torch.ones(3, 3), lambda rows, output: None),
            progress=lambda now: seen.append(now.what),
        )
    assert seen[-1] == "measuring the net of fill"


def test_a_hook_that_is_no_function_is_refused() -> None:
    """Before anything is measured."""
    with pytest.raises(ConfigError, match="progress is True: give a function"):
        pipeline(progress=True)
