"""Forwards of another net fill a pipeline's bubbles, and change nothing of it."""

from __future__ import annotations

import re
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.errors import ConfigError, WorkerError
from hocket.run.cluster.world import World
from tests.run.support.forked_launch import launch_forked
from tests.run.support.joined import join, said
from tests.run.support.plainly import SGD
from tests.run.support.started import started

NUM_STEPS = 6
WIDTH = 256


def batches(num: int) -> list[Any]:
    """Return random batches."""
    rng = torch.Generator().manual_seed(0)
    return [
        (torch.randn(64, WIDTH, generator=rng), torch.randn(64, WIDTH, generator=rng))
        for _ in range(num)
    ]


def model() -> nn.Module:
    """Return layers with dropout and batch norm."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), nn.ReLU()
        )
        for _ in range(8)
    ]
    return nn.Sequential(*layers)


def net() -> nn.Module:
    """Return the net that fills: small forwards."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 4)).eval()


def samples(num: int) -> Tensor:
    """Return the data set that it is to go over."""
    return torch.randn(num, 32, generator=torch.Generator().manual_seed(2))


def train(folder: str) -> dict[str, Any]:
    """Train alone; filled, with a save in the middle; and from there."""
    with closing(join()) as world:
        return _report(Path(folder), world)


def _report(folder: Path, world: World) -> dict[str, Any]:
    losses, state = _trained(world, None)
    few = samples(40)
    rows: list[Any] = []
    filled, weights = _trained(world, _fill(few, rows))
    found: dict[str, Any] = {
        "same_losses": filled == losses,
        "same_weights": all(torch.equal(x, weights[k]) for k, x in state.items()),
        "rows": [[r.start, r.stop] for r, _ in rows],
        "same_outputs": all(
            torch.equal(y, net()(few[r.start : r.stop])) for r, y in rows
        ),
    }
    found |= _resumed(folder, world)
    taught = _taught(0), _taught(0)
    alone, _ = _trained(world, None, **taught[0])
    few_rows: list[Any] = []
    beside, _ = _trained(world, _fill(few, few_rows), **taught[1])
    found["same_taught"] = beside == alone != losses
    found["taught_rows"] = [[r.start, r.stop] for r, _ in few_rows]
    errors = {name: _error(world, **options) for name, options in _refused().items()}
    return found | {"errors": errors}


def _taught(ahead: int) -> dict[str, Any]:
    """Return the options of a pipeline with a frozen teacher."""
    return {
        "teachers": {"teacher": hocket.Teacher(model(), look_ahead=ahead)},
        "loss": lambda output, targets, teachers: nn.functional.mse_loss(
            output, targets + teachers["teacher"].own
        ),
    }


def _resumed(folder: Path, world: World) -> dict[str, Any]:
    """Save after two of three steps, and train the third one again."""
    before: list[Any] = []
    after: list[Any] = []
    many = samples(100_000)
    num_saved = 0
    with _pipeline(world, _fill(many, before)) as pipeline:
        for result in pipeline.train(batches(3)):
            if result.step == 1:
                pipeline.save(folder)
                num_saved = len(before)
    with _pipeline(world, _fill(many, after)) as pipeline:
        pipeline.load(folder)
        list(pipeline.train(batches(3)[2:]))
        filling = pipeline.filling
    return {
        "num_samples": filling.num_samples,
        "counts": list(filling.counts),
        "slowdown": filling.predicted_slowdown,
        "before": [[r.start, r.stop] for r, _ in before[:num_saved]],
        "lost": len(before) - num_saved,
        "after": [[r.start, r.stop] for r, _ in after],
    }


def _fill(data: Any, rows: list[Any]) -> hocket.Fill:
    return hocket.Fill(net(), data, lambda r, y: rows.append((r, y)), batch_size=4)


def _refused() -> dict[str, dict[str, Any]]:
    slow = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).eval()
    wide = torch.randn(2048, 512)
    return {
        "long": {"fill": hocket.Fill(slow, wide, print, batch_size=2048)},
        "memory": {"memory_bytes": 1 << 20},
        "overlap": {"schedule": "pipedream-2bw"},
        "differs": {"differs": True},
        "ahead": _taught(1),
    }


def _error(world: World, *, differs: bool = False, **options: Any) -> str:
    fill = _fill(samples(9 + world.rank if differs else 9), [])
    return said(lambda: _pipeline(world, **{"fill": fill, **options}).close())


def _trained(
    world: World, fill: hocket.Fill | None, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    with _pipeline(world, fill, **options) as pipeline:
        results = [x.loss for x in pipeline.train(batches(NUM_STEPS))]
        return results, pipeline.state_dict()


def _pipeline(
    world: World, fill: hocket.Fill | None = None, **options: Any
) -> hocket.Pipeline:
    return started(
        model(),
        options.pop("loss", nn.functional.mse_loss),
        (lambda p: torch.optim.AdamW(p, 1e-3)),
        batches(1)[0],
        num_microbatches=4,
        fill=fill,
        world=world,
        **{"schedule": "1f1b", "cut": ["4"], **options},
    )


@pytest.fixture(scope="module", name="reports")
def train_filled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What both workers report.

    Where the machine is busy for a moment, the host is measured to need more for an op
    than the devices wait, and nothing is filled: then another time.
    """
    for attempt in range(4):
        folder = str(tmp_path_factory.mktemp("fill"))
        try:
            return launch_forked(
                f"{__name__}:train",
                [folder],
                num_workers=2,
                timeout_s=120,
                run_dir=folder,
            )
        except WorkerError as error:
            if "waits for so long at once" not in str(error) or attempt == 3:
                raise
    return None


@pytest.mark.timeout(480)
def test_the_pipeline_is_what_it_is_alone(reports: Any) -> None:
    """Weights and losses are bit-equal, with dropout and batch norm."""
    for report in reports:
        assert report["same_losses"]
        assert report["same_weights"]


@pytest.mark.timeout(480)
def test_each_sample_is_done_once(reports: Any) -> None:
    """On one of the workers; then the data set is exhausted, and training goes on."""
    rows = sorted(tuple(x) for report in reports for x in report["rows"])
    assert rows[0][0] == 0
    assert rows[-1][1] == 40
    assert all(a[1] == b[0] for a, b in pairwise(rows))
    assert all(report["same_outputs"] for report in reports)


@pytest.mark.timeout(480)
def test_beside_a_teacher_it_changes_nothing_either(reports: Any) -> None:
    """Of a student whose teacher runs with its own batch; all samples are done."""
    rows = sorted(tuple(x) for report in reports for x in report["taught_rows"])
    assert all(report["same_taught"] for report in reports)
    assert rows[0][0] == 0
    assert rows[-1][1] == 40
    assert all(a[1] == b[0] for a, b in pairwise(rows))


@pytest.mark.timeout(480)
def test_each_sample_is_done_once_across_a_resume(reports: Any) -> None:
    """Behind the checkpoint come those that it does not count, and no others."""
    rows = sorted(
        tuple(x) for report in reports for x in report["before"] + report["after"]
    )
    assert rows[0][0] == 0
    assert all(a[1] == b[0] for a, b in pairwise(rows))
    assert rows[-1][1] == reports[0]["num_samples"] == reports[1]["num_samples"]
    assert all(report["lost"] for report in reports)


@pytest.mark.timeout(480)
def test_a_step_is_predicted_to_take_as_long(reports: Any) -> None:
    """A simulated step grows by 2 % at most, and both devices are filled."""
    for report in reports:
        assert report["slowdown"] <= 0.02
        assert min(report["counts"]) >= 1


@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("long", "PlanError: fill: one forward takes .* Take a smaller batch_size"),
        ("memory", "FitError: .*smallest memory_bytes that works is"),
        ("overlap", "ConfigError: fill: steps of schedule 'pipedream-2bw' overlap"),
        ("ahead", "ConfigError: fill: .*with teachers, look_ahead=0"),
        ("differs", "SchemaError: ranks 0 and 1 differ in the settings of fill"),
    ],
)
def test_what_two_workers_refuse(reports: Any, name: str, text: str) -> None:
    """Every worker raises the same error, which says what to do."""
    for report in reports:
        assert re.match(text, report["errors"][name]), report["errors"][name]


def test_layers_that_freeze_are_refused() -> None:
    """The waits of another layout are others."""
    with pytest.raises(ConfigError, match="fill does not go with freeze: another lay"):
        started(
            nn.Linear(32, 4),
            nn.functional.mse_loss,
            SGD,
            (samples(3), torch.zeros(3, 4)),
            num_microbatches=1,
            freeze=hocket.freeze.Alpha(1 / 5),
            fill=hocket.Fill(net(), samples(3), _on_output),
        )


def test_what_is_refused_at_once() -> None:
    """A net that trains, samples that cannot be resumed, and options beside it."""
    few = samples(3)
    with pytest.raises(ConfigError, match=r"training mode .* Call net\.eval\(\)"):
        hocket.Fill(net().train(), few, _on_output)
    with pytest.raises(ConfigError, match=r"for a DataLoader, its \.dataset"):
        hocket.Fill(net(), iter(few), _on_output)
    with pytest.raises(ConfigError, match="samples is empty"):
        hocket.Fill(net(), [], _on_output)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        hocket.Fill(net(), few, _on_output, batch_size=0)
    model = nn.Linear(32, 4)
    with pytest.raises(ConfigError, match=r"shares weight .*deepcopy\(model\)\.eval"):
        started(
            model,
            nn.functional.mse_loss,
            SGD,
            (few, torch.zeros(3, 4)),
            num_microbatches=1,
            fill=hocket.Fill(nn.Sequential(model).eval(), few, _on_output),
        )


def _on_output(rows: range, output: Any) -> None:
    """Do nothing."""
