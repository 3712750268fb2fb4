"""Training with a cache of frozen layers' outputs equals training without it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.freeze.cache.shard import SUFFIX, file_bytes
from hocket.freeze.policy import LayerObservation
from hocket.run.elastic.cache import cached_prefix
from hocket.run.elastic.cache.output_rows import Begun
from tests.run.support.cache_runs import (
    NUM_TRIALS,
    SAMPLE_BYTES,
    assert_equal,
    in_epochs,
    in_folder,
    let_reading_pay,
    rest_of,
    without,
)
from tests.run.support.cached_workers import (
    BATCH_SIZE,
    ROOM,
    Rows,
    make_cached,
    make_chain,
    train,
)
from tests.run.support.forked_launch import launch_forked
from tests.run.support.freezing_workers import OneMore, make_model
from tests.run.support.started import started


@pytest.fixture(autouse=True)
def _reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    let_reading_pay(monkeypatch)


@pytest.mark.parametrize(
    "budgets",
    [(ROOM, 0), (0, ROOM), (20 * SAMPLE_BYTES, ROOM)],
    ids=["ram", "disk", "both"],
)
def test_equals_training_without_it_in_bits(
    tmp_path: Path, budgets: tuple[int, int]
) -> None:
    """In equal microbatches, stored as they are computed."""
    cache = in_folder(tmp_path, ram_bytes=budgets[0], disk_bytes=budgets[1])
    found = train(cache)
    assert_equal(found, without(), exact=True)
    assert in_epochs(without()[0]) == [0] * 6
    assert in_epochs(found[0]) == [0, 0, 0, 32, 0, 32]


def test_equals_training_without_it_in_other_microbatches(tmp_path: Path) -> None:
    """Of five samples and of one, in steps of two batches; of an exported model."""
    answers = []
    for cache in (in_folder(tmp_path), None):
        loader = hocket.SampleLoader(Rows(width=5), 10, seed=2, drop_last=False)
        options: dict[str, Any] = {"num_microbatches": 2, "accumulate": 2}
        answers.append(train(cache, loader, model=make_model(), **options))
    found, expected = answers
    assert_equal(found, expected)
    assert in_epochs(found[0])[3:] == [32, 0, 32]


def test_extends_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a layer more freezes, it alone runs; what was kept before is dropped.

    Past bug: to find the form of the new outputs, all frozen layers ran twice.
    """
    ran: list[int] = []
    run = Begun.run

    def counted(begun: Begun, *rest: Any) -> Any:
        ran.append(len(list(begun.runner.module.named_parameters())))
        return run(begun, *rest)

    monkeypatch.setattr(Begun, "run", counted)
    room = file_bytes(SAMPLE_BYTES, 48)  # of 32 samples twice, it has not
    cache = in_folder(tmp_path, ram_bytes=0, disk_bytes=room)
    found = train(cache, num_epochs=8)
    assert in_epochs(found[0]) == [0, 0, 0, 32, 0, 32, 0, 32]
    # Of each layer's outputs, the form is found by two forwards. Eight microbatches
    # follow, of which none is measured again; a Linear has two parameters.
    assert ran == [2] * (2 + 2 + 8 + 2 + 8)


def test_four_workers_equal_one_without_it(tmp_path: Path) -> None:
    """4x1 to 2x2 to 1x4, in float64; also on two hosts, whose folders are their own.

    In one folder, workers read what others have written, before the change of shape
    too. In two, each replica misses what the other host's has computed.
    """
    entry = "cached_workers:train_cached"
    folders = [
        [str(tmp_path / f"{num_hosts} {rank * num_hosts // 4}") for rank in range(4)]
        for num_hosts in (1, 2)
    ]
    found = launch_forked(entry, [folders], num_workers=4, run_dir=tmp_path)
    hits = []
    for answers in found:
        for steps, state in answers:
            assert [x[1] for x in steps] == ["4x1"] * 4 + ["2x2"] * 4 + ["1x4"] * 4
            tensors = {
                name: torch.tensor(value, dtype=torch.float64)
                for name, value in state.items()
            }
            assert_equal((steps, tensors), without())
        hits.append([in_epochs(steps)[3::2] for steps, _ in answers])
    assert hits == [hits[0]] * 4
    # Two workers of 1x4 held nothing frozen before: they measure in its second epoch.
    assert hits[0][0] == [32, 24]
    assert 0 < hits[0][1][0] < 32


def test_the_next_run_finds_what_is_kept(tmp_path: Path) -> None:
    """From the first epoch with frozen layers on, if they are the same."""
    cache = in_folder(tmp_path)
    train(cache, num_epochs=3)
    found, _ = train(cache, num_epochs=3)
    assert [x[2] for x in found] == [x[2] for x in without()[0][: len(found)]]
    assert in_epochs(found) == [0, 0, 32 - NUM_TRIALS]


def test_rounded_entries_give_the_same_from_the_first_epoch_on(tmp_path: Path) -> None:
    """In bfloat16, what is computed is rounded too; it takes a quarter of the bytes."""
    found = train(in_folder(tmp_path, dtype="bfloat16"), num_epochs=4)
    small = {"disk_bytes": 0, "ram_bytes": 20 * SAMPLE_BYTES // 4}
    cache = in_folder(tmp_path / "other", dtype="bfloat16", **small)
    other = train(cache, num_epochs=4)
    assert_equal(other, found, exact=True)
    assert in_epochs(found[0])[3] == 32
    assert 0 < in_epochs(other[0])[3] < 32
    losses = [x[2] for x in found[0]]
    expected = [x[2] for x in without()[0][: len(losses)]]
    assert losses != expected
    assert losses == pytest.approx(expected, rel=1e-2)


def test_off_where_computing_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both numbers are logged."""
    monkeypatch.setattr("hocket.freeze.cache.payoff._MOST", 0.0)
    caplog.set_level("INFO", logger="hocket.run.elastic.cache.cached_prefix")
    found = train(in_folder(tmp_path), num_epochs=4)
    assert in_epochs(found[0]) == [0] * 4
    [text] = caplog.messages
    assert text.startswith("outputs of the first 1 layers of the captured model, of 4")
    assert text.endswith("the cache is off")


def test_evaluation_uses_the_whole_net(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks the cache for nothing, though all samples are kept."""
    asked: list[int] = []
    outputs = cached_prefix.CachedPrefix.outputs

    def counted(*args: Any) -> Any:
        asked.append(1)
        return outputs(*args)

    monkeypatch.setattr(cached_prefix.CachedPrefix, "outputs", counted)
    loader = hocket.SampleLoader(Rows(), BATCH_SIZE)
    with started(
        make_chain(),
        F.cross_entropy,
        torch.optim.SGD,
        loader.example(),
        num_microbatches=4,
        freeze=hocket.freeze.Alpha(1 / 2, every_steps=1),
        shapes={},
        cache=in_folder(tmp_path),
    ) as pipeline:
        assert sum(x.num_samples for x in pipeline.train(loader)) == 32
        num_asked = len(asked)
        assert num_asked == 4
        pipeline.evaluate(loader)
        assert len(asked) == num_asked


@pytest.mark.parametrize("damaged", [False, True])
def test_a_resumed_run_ends_with_the_same_weights(
    tmp_path: Path, damaged: bool
) -> None:
    """It reads what it has kept; with a damaged folder it computes.

    The pipeline that loads has trained before, from other weights: what it has kept is
    of another prefix, in the same layout.
    """
    cache, saved = tmp_path / "cache", tmp_path / "saved"
    loader = hocket.SampleLoader(Rows(), BATCH_SIZE, seed=2)
    with make_cached(cache) as pipeline:
        first = [x.loss for _ in range(3) for x in pipeline.train(loader)]
        pipeline.save(saved, data=loader.state_dict())
    if damaged:
        for path in cache.glob(f"*{SUFFIX}"):
            os.truncate(path, 100)
    model = make_chain()
    nn.init.constant_(next(model.parameters()), 0.5)
    other = hocket.SampleLoader(Rows(), BATCH_SIZE, seed=5)
    with make_cached(cache, model) as pipeline:
        for _ in range(3):
            list(pipeline.train(other))
        loader.load_state_dict(pipeline.load(saved))
        found = rest_of(pipeline, loader, 3)
    expected, weights = without()
    assert_equal(found, (expected[len(first) :], weights), exact=True)


@dataclass(frozen=True, slots=True)
class UpAndDown(OneMore):
    """Freezes two layers, unfreezes one, unfreezes the other, freezes two again."""

    def decide(self, state: None, seen: LayerObservation) -> int:
        """The number after as many decisions."""
        return (2, 1, 0, 2, 2)[seen.number - 1]


def test_what_is_kept_of_layers_that_train_again_is_not_used(tmp_path: Path) -> None:
    """One layer of two goes on being frozen: its outputs were not kept alone."""
    found, expected = (
        train(cache, freeze=UpAndDown(every_steps=4), num_epochs=12)
        for cache in (in_folder(tmp_path), None)
    )
    assert_equal(found, expected, exact=True)
    frozen = [n for n in (0, 2, 1, 0, 2, 2) for _ in range(4)]
    assert [x[0] for x in found[0]] == frozen
    assert in_epochs(found[0]) == [0, 0, 0, 32, 0, 32, 0, 0, 0, 32, 32, 32]
