"""Corrected pipelines: drained or not, resumed or not, they come to the same bits.

In this process alone, which plays both of WPipe's stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.core.costs import StageCost
from tests.run.support.comparison import TOLERANCE, difference
from tests.run.support.optimizers import OPTIMIZERS, make_scheduler
from tests.run.support.small_models import ZOO, batches, make_model
from tests.run.weights.correction.cases import CASES
from tests.run.weights.correction.cases import CUT as CASES_CUT

NUM_STEPS: Final = 8
EMA: Final = 0.8
CUT: Final = "3"
FADES_OVER: Final = 5  # updates: in the middle of the run
STOPPED: Final = (1, 4)  # before and after a correction keeps all that it will


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The sums in the same order everywhere, and the generator as it was."""
    torch.set_num_threads(1)
    kept = torch.get_rng_state()
    yield
    torch.set_rng_state(kept)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured once."""
    return tmp_path_factory.mktemp("profiles")


def pipeline_of(
    correction: Any, optimizer: str, profiles: Path, **more: Any
) -> hocket.Pipeline:
    """A perceptron with dropout in two stages, of which the first is delayed."""
    fades = correction == "lr-discount"
    return hocket.Pipeline(
        make_model("dropout"),
        ZOO["dropout"].loss,
        optimizer=OPTIMIZERS[optimizer],
        scheduler=make_scheduler,
        example=data()[0],
        schedule="wpipe",
        num_microbatches=2,
        cut=[CUT],
        correction=correction,
        num_discounted_updates=FADES_OVER if fades else None,
        ema_decay=EMA,
        profile_dir=profiles,
        **more,
    )


def data() -> list[Any]:
    """Of equal batches."""
    return batches("dropout", NUM_STEPS, 8, 8)


def state_of(pipeline: hocket.Pipeline) -> list[dict[str, Tensor]]:
    """The weights, and their averages."""
    states = pipeline.state_dict(), pipeline.state_dict(ema=True)
    return [{name: x.clone() for name, x in state.items()} for state in states]


def assert_same(found: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> None:
    """To the last bit."""
    for one, two in zip(found, other, strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("correction", "optimizer"),
    [
        ("error-feedback", "muon"),
        ("weight-prediction", "muon"),
        ("lr-discount", "groups"),
    ],
)
@pytest.mark.timeout(120)
def test_drained_or_resumed_it_comes_to_the_same(
    correction: str, optimizer: str, profiles: Path, tmp_path: Path
) -> None:
    """And to what the oracle says; averages are of the weights, not of guesses."""
    with pipeline_of(correction, optimizer, profiles) as pipeline:
        losses = [result.losses for result in pipeline.train(data())]
        whole = state_of(pipeline)

    with pipeline_of(correction, optimizer, profiles) as pipeline:
        averages = state_of(pipeline)[1]
        for step, batch in enumerate(data()):
            if step in STOPPED:
                pipeline.save(tmp_path, keep=None)
            assert pipeline.step(batch).losses == losses[step]
            for name, weight in pipeline.state_dict().items():
                averages[name] = torch.lerp(averages[name], weight, 1 - EMA)
        assert_same(state_of(pipeline), whole)
    for name, average in averages.items():
        assert difference(whole[1][name], average) < TOLERANCE, name

    with pipeline_of(correction, optimizer, profiles, seed=3) as pipeline:
        for stopped in STOPPED:
            pipeline.load(tmp_path, step=stopped)
            rest = [result.losses for result in pipeline.train(data()[stopped:])]
            assert rest == losses[stopped:], stopped
            assert_same(state_of(pipeline), whole)

    expected = emulated(correction, optimizer)
    for name, weight in expected.items():
        assert difference(whole[0][name], weight) < TOLERANCE, name


def emulated(correction: Any, optimizer: str) -> dict[str, Tensor]:
    """The weights in the end."""
    model = make_model("dropout")
    hocket.emulate(
        hocket.Program.chain(range(2), 2, delays=[1, 0]),
        model,
        ZOO["dropout"].loss,
        OPTIMIZERS[optimizer],
        data(),
        cut_at=[CUT],
        schedulers=make_scheduler,
        correction=correction,
        num_discounted_updates=FADES_OVER if correction == "lr-discount" else None,
    )
    return model.state_dict()


@pytest.mark.parametrize(
    ("correction", "case"),
    [
        ("error-feedback", "muon, sometimes"),
        ("weight-prediction", "adamw, sometimes"),
        ("weight-prediction", "sgd, sparse"),
        ("error-feedback", "sgd, sparse"),
    ],
)
def test_gradients_of_all_kinds(correction: Any, case: str, profiles: Path) -> None:
    """Of few rows, or none in some steps: as the oracle has it."""
    make, make_batches, optimizer = CASES[case]
    model, expected, data = make(), make(), make_batches()
    with hocket.Pipeline(
        model,
        nn.functional.mse_loss,
        optimizer=optimizer,
        scheduler=make_scheduler,
        example=data[0],
        schedule="wpipe",
        num_microbatches=2,
        cut=[CASES_CUT],
        correction=correction,
        profile_dir=profiles,
    ) as pipeline:
        found = [result.loss for result in pipeline.train(data)]
        state = pipeline.state_dict()
    history = hocket.emulate(
        hocket.Program.chain(range(2), 2, delays=[1, 0]),
        expected,
        nn.functional.mse_loss,
        optimizer,
        data,
        cut_at=[CASES_CUT],
        schedulers=make_scheduler,
        correction=correction,
    )
    assert found == pytest.approx([losses["loss"] for losses in history], rel=1e-9)
    for name, weight in expected.state_dict().items():
        assert difference(state[name], weight) < TOLERANCE, name


@pytest.mark.parametrize(
    ("correction", "optimizer"),
    [
        ("none", "adamw"),
        ("error-feedback", "adamw"),
        ("weight-prediction", "adamw"),
        ("weight-prediction", "muon"),
    ],
)
def test_its_plan_counts_what_it_keeps(
    correction: str, optimizer: str, profiles: Path
) -> None:
    """To the byte, of the delayed stage; and nothing of the other one."""
    with pipeline_of(correction, optimizer, profiles) as pipeline:
        list(pipeline.train(data()[:3]))
        pipeline.step(data()[3])
        kept = [_kept_bytes(pipeline, stage) for stage in (0, 1)]
        front, back = pipeline.plan.costs.stages
        read = pipeline._executor.runners[0].versions
        assert read is not None
    assert [front.optimizer_bytes, back.optimizer_bytes] == kept
    assert front.guess_bytes == (
        front.gradient_bytes if correction == "weight-prediction" else 0
    )
    assert not back.guess_bytes
    _check_kept(correction, optimizer, front)


def _check_kept(correction: str, optimizer: str, front: StageCost) -> None:
    """Of what is kept, in copies of the weights."""
    copies = 3 if optimizer == "adamw" else 2  # its state, and the average
    if correction == "error-feedback":
        copies += 1
    if correction == "weight-prediction" and optimizer == "muon":
        copies += 1
    scalars = front.optimizer_bytes - copies * front.gradient_bytes
    assert 0 <= scalars < 100  # AdamW counts steps


def _kept_bytes(pipeline: hocket.Pipeline, stage: int) -> int:
    updater = pipeline._executor.updaters[stage]
    assert updater.optimizer is not None
    states = updater.optimizer.state.values()
    tensors = [x for state in states for x in state.values() if isinstance(x, Tensor)]
    tensors += (updater.ema or {}).values()
    if updater.correction is not None:
        kept = updater.correction.state_dict()["kept"].values()
        tensors += [x for each in kept for x in each]
    return sum(x.nbytes for x in tensors)
