"""Chosen steps are traced, with hocket's ops around torch's operators."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket import cuda
from hocket.errors import CallbackError, ConfigError
from hocket.run.engine.tracing import step_profiler
from hocket.run.engine.tracing.step_profiler import StepProfiler

WIDTH = 64
BATCH = torch.ones(64, WIDTH), torch.zeros(64, WIDTH)
DRIFT_US = 10.0  # of torch's clock, between its marks


def made(profile: hocket.ProfileSteps, schedule: str = "1f1b") -> hocket.Pipeline:
    """Of one device, and two microbatches."""
    torch.manual_seed(0)
    return hocket.Pipeline(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)),
        nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        example=BATCH,
        schedule=schedule,
        num_microbatches=2,
        profile=profile,
    )


def slices_of(path: Path) -> tuple[list[dict[str, Any]], float]:
    """The slices of a trace, and by how much its two clocks may differ."""
    trace = json.loads(path.read_text())
    slack_us = float(trace["hocket"]["clock_error_us"]) + DRIFT_US
    return [x for x in trace["traceEvents"] if x["ph"] == "X"], slack_us


def test_ops_contain_the_operators_of_their_thread(tmp_path: Path) -> None:
    """Of two steps in a row, and of another one; the others are not traced."""
    folder = tmp_path / "traces"
    with made(hocket.ProfileSteps([1, 2, 4], folder)) as pipeline:
        for result in pipeline.train([BATCH] * 6):
            assert (folder / "steps-1-2-rank-0.json").exists() == (result.step >= 2)
            assert (folder / "steps-4-4-rank-0.json").exists() == (result.step >= 4)
    assert len([*folder.iterdir()]) == 2

    events, slack_us = slices_of(folder / "steps-1-2-rank-0.json")
    ops = [x for x in events if x.get("cat", "").startswith("hocket")]
    names = [op["name"] for op in ops]
    assert names == [
        f"0{kind}@{step}" for step in (1, 2) for kind in ("F0", "B0", "F1", "B1", "U")
    ]
    assert not [x for x in events if "mark" in x["name"]]
    thread = threading.get_native_id()
    kernels = {"aten::addmm", "aten::gelu", "aten::gelu_backward", "aten::mm"}
    found = [x for x in events if x["name"] in kernels]
    assert {(x["pid"], x["tid"]) for x in found} == {(os.getpid(), thread)}
    inside = [
        [
            kernel["name"]
            for kernel in found
            if op["ts"] - slack_us <= kernel["ts"]
            and kernel["ts"] + kernel["dur"] <= op["ts"] + op["dur"] + slack_us
        ]
        for op in ops
    ]
    assert sum(map(len, inside)) >= len(found)  # each is in an op
    for op, own in zip(ops, inside, strict=True):
        if "F" in op["name"]:
            assert own.count("aten::addmm") >= 2
            assert "aten::gelu" in own
        if "B" in op["name"]:
            assert "aten::gelu_backward" in own


def test_overlapping_steps_are_traced_from_their_first_op_to_their_last(
    tmp_path: Path,
) -> None:
    """Other steps' ops lie between them."""
    profile = hocket.ProfileSteps([2], tmp_path)
    with made(profile, "pipedream-2bw") as pipeline:
        [*pipeline.train([BATCH] * 6)]
    (path,) = tmp_path.iterdir()
    slices, _ = slices_of(path)
    names = [x["name"] for x in slices if "hocket" in x.get("cat", "")]
    own = {f"0{kind}@2" for kind in ("F0", "B0", "F1", "B1", "U")}
    assert own <= {*names}


def test_what_a_trace_cannot_be_written_to_ends_nothing(tmp_path: Path) -> None:
    """Training goes on, and the error is raised behind it."""
    (tmp_path / "file").write_text("no folder")
    with made(hocket.ProfileSteps([0, 2], tmp_path / "file")) as pipeline:
        with pytest.raises(CallbackError, match="the trace of chosen steps failed: "):
            [*pipeline.train([BATCH] * 4)]
        assert pipeline.step(BATCH).step == 4


@pytest.mark.parametrize("fails_at", ["start", "write_memory_history", "add_ops"])
def test_a_trace_that_fails_leaves_nothing_on(
    fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the history of memory nor a file that is not finished."""
    calls: list[str] = []

    def fails(*_: object) -> None:
        raise OSError(f"no {fails_at}")

    monkeypatch.setattr(hocket.ProfileSteps, "check_device", lambda *_: None)
    for name in ("record", "write", "stop"):
        monkeypatch.setattr(
            cuda,
            f"{name}_memory_history",
            lambda *_, name=name: calls.append(name),
        )
    owner: Any = {"start": torch.profiler.profile, "add_ops": step_profiler}
    monkeypatch.setattr(owner.get(fails_at, cuda), fails_at, fails)
    settings = hocket.ProfileSteps([0], tmp_path, memory=True)
    profiler = StepProfiler(settings, 0, torch.device("cpu"))
    profiler.before([0])
    profiler.close()
    profiler.close()

    (error,) = profiler.take_errors()
    assert str(error) == f"no {fails_at}"
    assert (calls[0], calls[-1]) == ("record", "stop")
    assert calls.count("stop") == 1
    assert not [*tmp_path.iterdir()]


def test_a_snapshot_of_memory_needs_a_gpu(tmp_path: Path) -> None:
    """And is refused on a CPU, instead of left out."""
    profile = hocket.ProfileSteps(range(2), tmp_path, memory=True)
    with pytest.raises(ConfigError, match="only for CUDA, and this worker computes on"):
        made(profile)


@pytest.mark.parametrize(
    ("steps", "reported"),
    [(range(3, 3), "it is empty"), ([2, -1], "got -1"), (["3"], "got '3'")],
)
def test_what_is_no_step_is_refused(steps: Any, reported: str) -> None:
    """At once."""
    with pytest.raises(ConfigError, match=reported):
        hocket.ProfileSteps(steps)
