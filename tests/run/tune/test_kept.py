"""What was measured is reused where it fits, and measured anew where it does not."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.core.costs import Costs
from hocket.model.guards.code_text import UnknownCodeError, code_text
from hocket.run.cluster.world import join_world
from hocket.run.tune import build
from hocket.run.tune.cut import cut_model, profiled_model
from tests.run.support.forked import answers_of
from tests.run.support.started import started


def start_thrice(folder: str) -> dict[str, Any]:
    """First and second with this rank's folder, then rank 0 with an empty one.

    Rank 1's folder is empty the second time, and has everything the third time.
    """
    world = join_world()
    num_measured = 0
    patch = pytest.MonkeyPatch()
    for module, name in (
        (profiled_model, "profile_layers"),
        (cut_model, "measure_updates"),
        (build, "dry_run"),
    ):
        measure = getattr(module, name)

        def noted(*args: Any, measure: Any = measure, **named: Any) -> Any:
            nonlocal num_measured
            num_measured += 1
            return measure(*args, **named)

        patch.setattr(module, name, noted)

    found, counts = [], []
    for own in (("full", "empty"), ("full", "empty"), ("empty", "full")):
        num_before = num_measured
        batch = torch.ones(4, 3), torch.zeros(4, 3)
        torch.manual_seed(0)
        with started(
            nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
            nn.functional.mse_loss,
            torch.optim.SGD,
            batch,
            profile_dir=Path(folder) / own[world.rank],
            world=world,
        ) as pipeline:
            pipeline.step(batch)
            found.append(pipeline.plan.costs)
        counts.append(num_measured - num_before)
    everyone = [
        {*map(str, world.gather_json(str(costs), "costs"))} for costs in found[:2]
    ]
    are_equal = [len(texts) == 1 for texts in everyone]
    world.close()
    return {"measured": counts, "are_equal": are_equal}


def start_beside_another(folder: str) -> dict[str, Any]:
    """Start on the only core of a program that never waits."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["HOCKET_KEEP_BUSY_PROFILES"] = "0"
    batch = torch.ones(64, 256), torch.zeros(64, 256)
    layers = [nn.Linear(256, 256) for _ in range(4)]
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            with started(
                nn.Sequential(*layers),
                nn.functional.mse_loss,
                torch.optim.SGD,
                batch,
                profile_dir=Path(folder) / "kept",
            ) as pipeline:
                profile = pipeline.plan.profile
        finally:
            other.kill()
    return {
        "core_wait": profile.core_wait,
        "noise": profile.noise,
        "kept": [x.name for x in Path(folder).glob("kept/*")],
    }


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(),
    reason="this system does not count how long a thread waits for a core",
)
@pytest.mark.timeout(60)
def test_what_is_measured_beside_other_programs_is_not_kept(tmp_path: Path) -> None:
    """It is measured twice and used, and the next start measures again."""
    (found,) = answers_of(
        f"{__name__}:start_beside_another",
        str(tmp_path),
        num_workers=1,
        folder=tmp_path / "job",
    )
    assert 0.1 < found["core_wait"] < 1
    assert "had a worker's core" in found["noise"]
    assert found["kept"] == []


MEASURED = {
    "layers": (profiled_model, "profile_layers"),
    "updates": (cut_model, "measure_updates"),
    "steps": (build, "dry_run"),
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is measured, as it is."""
    seen: list[str] = []
    for name, (module, function) in MEASURED.items():
        measure = getattr(module, function)

        def noted(
            *args: Any, name: str = name, measure: Any = measure, **named: Any
        ) -> Any:
            seen.append(name)
            return measure(*args, **named)

        monkeypatch.setattr(module, function, noted)
    return seen


def costs(folder: Path, width: int = 3, rows: int = 4, **options: Any) -> Costs:
    """Make a pipeline, and return its costs."""
    torch.manual_seed(0)
    usual: dict[str, Any] = {
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "loss": nn.functional.mse_loss,
        "schedule": "gpipe",
        "num_microbatches": 2,
    }
    with hocket.Pipeline(
        nn.Sequential(nn.Linear(3, width), nn.Linear(width, 3)),
        example=(torch.ones(rows, 3), torch.zeros(rows, 3)),
        profile_dir=folder,
        **(usual | options),
    ) as pipeline:
        return pipeline.plan.costs


def test_a_second_start_measures_nothing(tmp_path: Path, measured: list[str]) -> None:
    """And counts on the same seconds, digit by digit."""
    first = costs(tmp_path)
    assert measured == ["layers", "updates", "steps"]
    assert costs(tmp_path) == first
    assert measured == ["layers", "updates", "steps"]


@pytest.mark.parametrize(
    ("options", "anew"),
    [
        ({"width": 5}, ["layers", "updates", "steps"]),
        ({"rows": 8}, ["layers", "updates", "steps"]),
        ({"precision": "bfloat16"}, ["layers", "updates", "steps"]),
        ({"loss": nn.functional.l1_loss}, ["layers", "updates", "steps"]),
        ({"optimizer": torch.optim.Adam}, ["updates", "steps"]),
        ({"clip_norm": 1.0}, ["updates", "steps"]),
        ({"schedule": "1f1b", "recompute": "all"}, ["steps"]),
    ],
    ids=lambda given: "-".join(given),
)
def test_what_the_numbers_depend_on_is_measured_anew(
    tmp_path: Path, measured: list[str], options: dict[str, Any], anew: list[str]
) -> None:
    """No more than that; and the first is still there."""
    first = costs(tmp_path)
    measured.clear()
    costs(tmp_path, **options)
    assert measured == anew
    assert costs(tmp_path) == first
    assert measured == anew


def test_the_device_and_versions_are_conditions(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another number of threads, or another torch."""
    costs(tmp_path)
    measured.clear()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    costs(tmp_path)
    monkeypatch.setattr(torch, "__version__", "99.0")
    costs(tmp_path)
    assert measured == 2 * ["layers", "updates", "steps"]


def test_a_torn_file_is_measured_again(
    tmp_path: Path, measured: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """And replaced by a whole one; the log names it."""
    costs(tmp_path)
    paths = [*tmp_path.iterdir()]
    assert len(paths) == 3
    for path in paths:
        path.write_bytes(path.read_bytes()[:-9] + b"\xff")
    measured.clear()
    first = costs(tmp_path)
    assert measured[0] == "layers"
    assert "measured again" in caplog.text
    measured.clear()
    assert costs(tmp_path) == first
    assert not measured


def test_a_folder_that_cannot_be_written_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The pipeline is made, and the log says why the next start measures again."""
    (tmp_path / "file").write_text("no folder")
    costs(tmp_path / "file" / "profiles")
    warnings = [x for x in caplog.records if x.levelno == logging.WARNING]
    assert len(warnings) == 3
    assert "the next start measures again" in warnings[0].getMessage()


@pytest.mark.timeout(100)
def test_rank_0_decides_for_all(tmp_path: Path) -> None:
    """Whatever the others have: all reuse, or all measure; with the same result."""
    answers = answers_of(
        f"{__name__}:start_thrice", str(tmp_path / "profiles"), folder=tmp_path / "job"
    )
    assert answers[0] == answers[1]
    assert answers[0]["measured"] == [3, 0, 3]
    assert answers[0]["are_equal"] == [True, True]


def scaled(weight: float) -> Any:
    """Return a loss that is made of a number."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return weight * nn.functional.mse_loss(output, targets)

    return loss


def test_code_text_is_of_the_code_and_its_arguments() -> None:
    """Equal for the same, and for nothing else."""
    losses = [
        nn.functional.mse_loss,
        nn.functional.l1_loss,
        scaled(1.0),
        scaled(2.0),
        lambda output, _: output.sum(),
        lambda output, _: output.mean(),
        partial(nn.functional.cross_entropy, label_smoothing=0.1),
        partial(nn.functional.cross_entropy, label_smoothing=0.2),
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(ignore_index=0),
        hocket.WholeBatch(nn.functional.mse_loss),
        hocket.PerMicrobatch(nn.functional.mse_loss),
    ]
    texts = [code_text(loss) for loss in losses]
    assert len({*texts}) == len(losses)
    assert texts == [code_text(loss) for loss in losses]
    assert code_text(scaled(1.0)) == texts[2]
    assert not [text for text in texts if " at 0x" in text]


def test_code_text_is_of_inherited_calls_and_of_variables_not_yet_set() -> None:
    """A class without a `__call__` of its own, and a function made before a value."""

    class Mean:
        def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
            return (output - targets).square().mean()

    class Sum:
        def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
            return (output - targets).square().sum()

    texts = []
    for base in (Mean, Sum):
        heir = type("Heir", (base,), {"__qualname__": "Heir"})
        base.__call__.__qualname__ = "__call__"
        texts.append(code_text(heir()))
    assert texts[0] != texts[1]

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return scale * nn.functional.mse_loss(output, targets)

    before = code_text(loss)
    scale = 2.0
    assert code_text(loss) != before


MINE = """
from torch.nn import functional
import other_file_of_mine as other
import torch

power = 2

class Shared:
    def __call__(self, x):
        return helper(x)

def helper(x):
    return x.abs() ** power

def loss(output, targets):
    return Shared()(output - targets).mean() + other.extra(output)

class Trainer:
    def __init__(self):
        self.scale, self.seen = 2.0, torch.zeros(3)

    def loss(self, output, targets):
        return self.scale * self.inner(output, targets)

    def inner(self, output, targets):
        return functional.mse_loss(output, targets)
"""


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], ModuleType]:
    """Run a user's file in which one text is replaced by another."""

    def run(old: str, new: str) -> ModuleType:
        assert old in MINE
        other = ModuleType("other_file_of_mine")
        exec("def extra(output): return output.sum()", vars(other))
        monkeypatch.setitem(sys.modules, "other_file_of_mine", other)
        module = ModuleType("file_of_mine")
        exec(MINE.replace(old, new), vars(module))
        return module

    return run


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x.abs()", "x.cos()"),
        ("power = 2", "power = 3"),
        ("return helper(x)", "return helper(helper(x))"),
    ],
)
def test_code_text_is_of_what_a_loss_calls(written: Any, old: str, new: str) -> None:
    """Helpers, classes and numbers of the same names, and what other files have."""
    before = written(old, old).loss
    text = code_text(before)
    assert code_text(written(old, old).loss) == text
    assert code_text(written(old, new).loss) != text
    before.__globals__["other"].extra = torch.mean
    assert code_text(before) != text


def test_code_text_is_of_a_methods_class_and_object(written: Any) -> None:
    """Other methods and attributes among them; of tensors the shape, not the values."""
    trainer = written("mse_loss", "mse_loss").Trainer()
    text = code_text(trainer.loss)
    assert code_text(written("mse_loss", "l1_loss").Trainer().loss) != text
    for name, value in (("seen", torch.zeros(4)), ("scale", 3.0)):
        other = written("mse_loss", "mse_loss").Trainer()
        setattr(other, name, value)
        assert code_text(other.loss) != text
    trainer.seen = torch.ones(3)
    assert code_text(trainer.loss) == text


def unknown_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Compute with an object that shows nothing of itself."""
    with LOCK:
        return nn.functional.mse_loss(output, targets)


LOCK = threading.Lock()


def test_what_is_not_known_is_not_kept(tmp_path: Path, measured: list[str]) -> None:
    """It is measured by each start, and leaves no files behind."""
    for loss in (unknown_loss, lambda *_: eval("0"), {object()}):
        with pytest.raises(UnknownCodeError):
            code_text(loss)
    for _ in range(2):
        costs(tmp_path, loss=unknown_loss)
    assert measured == 2 * ["layers", "updates", "steps"]
    assert not [*tmp_path.iterdir()]
