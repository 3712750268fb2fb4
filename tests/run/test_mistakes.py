"""All workers raise the errors of metrics; a missed call is named."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.errors import ConfigError, ModelError
from hocket.run.tune.cut import profiled_model
from tests.run.support.forked import run_forked
from tests.run.support.joined import reported
from tests.run.support.plainly import SGD
from tests.run.support.started import started

BATCH = torch.ones(4, 3), torch.zeros(4, 3)


def watch() -> dict[str, Any]:
    """Let what watches fail; return what was raised, and what still works."""
    logging.disable()
    missing: Any = None
    with made() as pipeline:
        raised = [
            reported(lambda: pipeline.evaluate([BATCH] * 2, broken_metrics), Exception),
            reported(lambda: pipeline.evaluate([]), Exception),
            reported(lambda: next(pipeline.train(missing)), Exception),
        ]
        return {
            "raised": raised,
            "step": pipeline.step(BATCH).step,
            "loss": pipeline.evaluate([BATCH]).loss,
            "names": sorted(pipeline.state_dict()),
        }


def call_differently(folder: str, first: str, second: str) -> list[Any]:
    """Rank 0 makes one call, rank 1 another; return what it raised, and how soon."""
    pipeline = made()
    pipeline.step(BATCH)
    calls = {
        "evaluate": lambda: pipeline.evaluate([BATCH]),
        "outputs": lambda: pipeline.outputs([BATCH]),
        "train": lambda: [*pipeline.train([BATCH])],
        "step": lambda: [pipeline.step(BATCH) for _ in range(3)],
        "state_dict": pipeline.state_dict,
        "save": lambda: pipeline.save(folder),
        "load": lambda: pipeline.load(folder),
        "measured": pipeline.measured,
        "close": pipeline.close,
        "nothing": lambda: None,
    }
    begin_s = monotonic()
    error = reported(calls[first if pipeline.is_main else second], Exception)
    return [*error, monotonic() - begin_s]


def made() -> hocket.Pipeline:
    """Of two stages."""
    torch.manual_seed(0)
    return started(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
        nn.functional.mse_loss,
        SGD,
        BATCH,
        cut=["1"],
    )


def broken_metrics(output: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Fail."""
    raise KeyError("accuracy")


WORKERS: Final = __name__
MODEL: Final = nn.Sequential(nn.Linear(3, 3))

pytestmark = pytest.mark.timeout(60)


def test_what_watches_ends_nothing(tmp_path: Path) -> None:
    """Metrics fail on rank 1: both workers raise, and both go on."""
    outcome = run_forked(f"{WORKERS}:watch", folder=tmp_path, timeout_s=20.0)
    assert not outcome.reports
    first, second = (outcome.results[rank] for rank in (0, 1))
    assert first == second
    metrics, empty, none = first["raised"]
    assert metrics[0] == "MetricsError"
    assert "failed on rank 1: KeyError: 'accuracy'" in metrics[1]
    assert empty[0] == none[0] == "DataError"
    assert "got NoneType" in none[1]
    assert (first["step"], len(first["names"])) == (0, 4)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("evaluate", "train"),
        ("close", "evaluate"),
        ("save", "state_dict"),
        ("state_dict", "step"),
        ("step", "state_dict"),
        ("step", "evaluate"),
        ("outputs", "step"),
        ("step", "measured"),
        ("load", "step"),
        ("step", "save"),
        ("close", "step"),
    ],
)
def test_a_missed_call_is_named_at_once(
    tmp_path: Path, first: str, second: str
) -> None:
    """On both ranks, long before the timeout.

    `if pipeline.is_main: torch.save(pipeline.state_dict(), ...)`, a habit from DDP,
    ended in gloo's timeout, since the other rank was in its next step.
    """
    outcome = run_forked(
        f"{WORKERS}:call_differently",
        str(tmp_path),
        first,
        second,
        folder=tmp_path,
        timeout_s=50.0,
    )
    calls = [
        "step() or train() for step 1" if call == "step" else f"{call}()"
        for call in (first, second)
    ]
    for rank in (0, 1):
        kind, message, seconds = outcome.results[rank]
        assert kind == "SchemaError", message
        assert message.startswith(
            f"rank 1 never called {calls[0]}: it called {calls[1]} where rank 0 called "
        )
        assert seconds < 20.0


def test_a_call_that_never_comes_is_named(tmp_path: Path) -> None:
    """After the timeout."""
    outcome = run_forked(
        f"{WORKERS}:call_differently",
        str(tmp_path),
        "evaluate",
        "nothing",
        folder=tmp_path,
        timeout_s=1.0,
    )
    kind, message, _ = outcome.results[0]
    assert kind == "WaitError"
    assert message.endswith("for rank 1, which never called evaluate()")


class Shifted(nn.Linear):
    """Has a buffer without values."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("shift", torch.zeros(3, device="meta"))


USUAL: Final[dict[str, Any]] = {
    "model": MODEL,
    "loss": nn.functional.mse_loss,
    "optimizer": torch.optim.SGD,
    "example": BATCH,
    "num_microbatches": 2,
}


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (
            {"optimizer": torch.optim.SGD(MODEL.parameters(), 0.1)},
            r"optimizer is SGD, made already: .* `lambda p: torch.optim.SGD\(p, ...\)`",
        ),
        ({"optimizer": "adam"}, "optimizer must be a function .* got str 'adam'"),
        ({"optimizer": lambda _: None}, "it returned NoneType"),
        ({"scheduler": 3}, "scheduler must be a function .* got int 3"),
        ({"loss": nn.MSELoss}, r"loss is the class MSELoss: .* `MSELoss\(\)`"),
        ({"loss": "mse"}, "loss must be a function of output and targets"),
        ({"model": nn.Linear}, "model is the class Linear: give a module"),
        ({"model": nn.Linear(3, 3, device="meta")}, "weight is on the meta device"),
        ({"model": Shifted()}, "shift is on the meta device, .*`to_empty` would untie"),
        ({"device": "cuda"}, "takes no argument 'device'; each worker takes its own"),
    ],
)
def test_what_is_no_argument_is_refused_in_words(
    arguments: dict[str, Any], reported: str
) -> None:
    """Not by a TypeError from within."""
    with pytest.raises(ConfigError, match=reported):
        hocket.Pipeline(**(USUAL | arguments))


def classes(output: Tensor, targets: Tensor) -> Tensor:
    """Wants one class for each sample."""
    return nn.functional.cross_entropy(output, targets)


def halved(output: Tensor, targets: Tensor, teachers: Any) -> Tensor:
    """Takes a teacher for its output."""
    return nn.functional.mse_loss(output, teachers["x"] / 2)


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (
            {"loss": classes, "example": (BATCH[0], torch.zeros(4))},
            r"expected target .*output: \(2, 3\) float32; targets: \(2,\) float32$",
        ),
        (
            {"loss": classes, "example": (BATCH[0], torch.zeros(4).int())},
            r"loss\(output, targets\) with .* targets: \(2,\) int32$",
        ),
        ({"loss": lambda output: output.mean()}, "takes 1 positional argument"),
        (
            {"loss": halved, "teachers": {"x": hocket.Teacher(nn.Linear(3, 3))}},
            r"unsupported .*with output: .*; teachers\['x'\].own: \(2, 3\) float32$",
        ),
    ],
)
def test_a_loss_that_fails_is_named(arguments: dict[str, Any], reported: str) -> None:
    """With what it was called with: not as a fault of the model."""
    match = f"the loss, called with the example, failed with .*{reported}"
    with pytest.raises(ModelError, match=match):
        hocket.Pipeline(**(USUAL | arguments))


@dataclass
class Scored:
    """What torch does not know as a structure."""

    scores: Tensor


class Scores(nn.Linear):
    """Returns its output in one."""

    def forward(self, x: Tensor) -> Any:
        """As a linear layer."""
        return Scored(super().forward(x))


def test_a_dataclass_as_output_is_to_be_registered() -> None:
    """The error says how; then it trains."""
    arguments = USUAL | {
        "model": Scores(3, 3),
        "loss": lambda output, targets: classes(output.scores, targets),
        "example": (BATCH[0], torch.zeros(4).long()),
    }
    with pytest.raises(ModelError, match=r"torch.export.register_dataclass\(Scored\)"):
        hocket.Pipeline(**arguments)
    torch.export.register_dataclass(Scored)
    with hocket.Pipeline(**arguments) as pipeline:
        assert pipeline.step(arguments["example"]).loss > 0


def test_a_cut_has_no_effect_on_one_worker() -> None:
    """A script for two workers runs; names are looked at all the same."""
    chain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    arguments = USUAL | {"model": chain}
    with pytest.warns(UserWarning, match="cut has no effect on one worker"):
        hocket.Pipeline(**arguments, cut=["2"]).close()
    with pytest.raises(ModelError, match=r"layer\.3 is no module of the model"):
        hocket.Pipeline(**arguments, cut=["layer.3"])


@pytest.mark.parametrize("name", ["layer.3", "1.0", "1@1", "layer.linear"])
def test_a_cut_is_looked_at_before_the_model_is_captured(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Where it is neither a module nor what a function in a module may be called."""

    def capture(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model is captured")

    monkeypatch.setattr(profiled_model, "capture", capture)
    with pytest.raises(ModelError, match=r"is no module of the model; there are '0'"):
        hocket.Pipeline(**USUAL, cut=[name])
    with pytest.raises(AssertionError, match="is captured"):
        hocket.Pipeline(**USUAL, cut=["linear"])


def test_auto_chooses_an_order_that_a_whole_batch_loss_can_have() -> None:
    """Beside a teacher, too."""

    def loss(output: Tensor, targets: Tensor, teachers: Any) -> Tensor:
        return nn.functional.mse_loss(output, teachers["x"].own)

    arguments = USUAL | {
        "loss": hocket.WholeBatch(loss),
        "teachers": {"x": hocket.Teacher(nn.Linear(3, 3))},
        "schedule": "auto",
    }
    with hocket.Pipeline(**arguments) as pipeline:
        assert pipeline.step(BATCH).loss > 0


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ({"loss": nn.MSELoss}, "loss is the class MSELoss"),
        ({"model": 3}, "model must be a torch.nn.Module; got int 3"),
        ({"optimizer": "adam"}, "optimizer must be a function"),
    ],
)
def test_plans_refuse_the_same(arguments: dict[str, Any], reported: str) -> None:
    """Before anything is measured; a model on the meta device is all right there."""
    usual: dict[str, Any] = {"model": MODEL, "batch": BATCH, "num_devices": 2}
    with pytest.raises(ConfigError, match=reported):
        hocket.plan(**(usual | arguments))
