"""Faults of the cache of frozen layers' outputs are refused, or change no weight."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.errors import ConfigError, DataError
from hocket.freeze.cache.disk import claim_folder
from hocket.freeze.cache.shard import SUFFIX, Content, Key, Shard
from hocket.run.elastic.cache.cached_prefix import CacheWarning
from tests.run.support.cache_runs import (
    NUM_TRIALS,
    assert_equal,
    in_epochs,
    in_folder,
    let_reading_pay,
    rest_of,
    without,
)
from tests.run.support.cached_workers import (
    BATCH_SIZE,
    NUM_EPOCHS,
    Rows,
    make_cached,
    make_chain,
    train,
)
from tests.run.support.forked import run_forked
from tests.run.support.resuming_workers import TORN_AT
from tests.run.support.started import started


@pytest.fixture(autouse=True)
def _reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    let_reading_pay(monkeypatch)


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_folder_changes_no_weight(tmp_path: Path, damage: str) -> None:
    """Entries that are not whole are computed; the others are read."""
    cache = in_folder(tmp_path, ram_bytes=0)
    train(cache, num_epochs=3)
    for path in (tmp_path / "cache").glob(f"*{SUFFIX}"):
        text = bytearray(path.read_bytes())
        if damage == "flipped":
            for place in range(4096, len(text), 2000):
                text[place] ^= 4
        path.write_bytes(text if damage == "flipped" else text[: len(text) // 2])
        if damage == "gone":
            path.unlink()
    found = train(cache)
    assert_equal(found, without(), exact=True)
    assert in_epochs(found[0])[2] < 32 - NUM_TRIALS
    assert in_epochs(found[0])[3] == 32


def test_killed_in_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers end; one goes on from the last checkpoint, with the torn folder.

    The torn entry is read as none, computed, written and used again.
    """
    saved, cache = tmp_path / "checkpoints", tmp_path / "cache"
    outcome = run_forked(
        "resuming_workers:die_in_cache_write",
        *(str(saved), str(cache)),
        folder=tmp_path,
        timeout_s=20.0,
    )
    assert outcome.codes[1] == -9
    assert outcome.codes[0] not in {0, None}
    assert not outcome.hung
    reads: list[tuple[Key, bool]] = []
    read = Shard.read

    def spied(shard: Shard, slot: int, key: Key) -> Content | None:
        found = read(shard, slot, key)
        reads.append((key, found is not None))
        return found

    monkeypatch.setattr(Shard, "read", spied)
    for path in cache.glob(f"*{SUFFIX}"):
        shard = Shard.open(path, own_within=0)
        assert shard is not None
        for slot, key in shard.records().items():
            shard.read(slot, key)
        shard.close()
    [torn] = [key for key, is_whole in reads if not is_whole]
    assert len(reads) > 1
    reads.clear()

    loader = hocket.SampleLoader(Rows(), BATCH_SIZE, seed=2)
    with make_cached(cache) as pipeline:
        loader.load_state_dict(pipeline.load(saved))
        assert pipeline.num_steps == TORN_AT
        found = rest_of(pipeline, loader, 4)
    expected, weights = without()
    assert_equal(found, (expected[TORN_AT:], weights))
    assert [hits for *_, hits in found[0][1:3]] == [BATCH_SIZE] * 2
    own = [is_whole for key, is_whole in reads if key == torn]
    assert (own[0], own[-1]) == (False, True)


def test_random_transforms_are_refused_or_drawn_once(tmp_path: Path) -> None:
    """With the numbers; drawn once, all epochs have the samples of the first one."""
    loader = hocket.SampleLoader(Rows(noise=0.5), BATCH_SIZE, seed=2)
    with pytest.raises(DataError, match="32 of 32 samples differ between epochs 0 a"):
        train(in_folder(tmp_path), loader)
    found = train(in_folder(tmp_path, draws_once=True), loader, num_epochs=4)
    fixed = Rows()
    rows = torch.arange(32)
    fixed._inputs = Rows(noise=0.5).inputs(rows, loader.draw(0, None))
    expected = train(None, hocket.SampleLoader(fixed, BATCH_SIZE, seed=2), num_epochs=4)
    assert_equal(found, expected, exact=True)
    assert in_epochs(found[0])[3] == 32


class NeverTheSame(Rows):
    """Draws numbers of its own."""

    def inputs(self, rows: Tensor, draw: object) -> Tensor:
        """Their inputs: (B, width)."""
        return super().inputs(rows, None) + torch.rand(len(rows), 1)


def test_loaders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Before the first step."""
    cache = in_folder(tmp_path, draws_once=True)
    with pytest.raises(DataError, match="differ when they are read twice"):
        train(cache, hocket.SampleLoader(NeverTheSame(), BATCH_SIZE))
    batches = [*hocket.SampleLoader(Rows(), BATCH_SIZE)]
    with started(
        make_chain(),
        F.cross_entropy,
        torch.optim.SGD,
        batches[0],
        num_microbatches=4,
        freeze=hocket.freeze.Alpha(1 / 2),
        cache=cache,
    ) as pipeline:
        with pytest.raises(DataError, match=r"a list does not say .*SampleLoader"):
            [*pipeline.train(batches)]
        with pytest.raises(DataError, match=r"given to step\(\) .*SampleLoader"):
            pipeline.step(batches[0])


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    """When the pipeline is made."""
    cache = in_folder(tmp_path)
    claim_folder(Path(cache.folder), "abc")
    with pytest.raises(ConfigError, match="is the cache of another model"):
        train(cache)


@pytest.mark.filterwarnings(
    "ignore::hocket.run.elastic.cache.cached_prefix.CacheWarning"
)
def test_a_full_disk_changes_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said once, and training goes on."""

    def is_full(handle: int, begin: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", is_full)
    with pytest.warns(CacheWarning, match="cannot grow: No space left") as warned:
        found = train(in_folder(tmp_path, ram_bytes=0))
    assert len([x for x in warned if x.category is CacheWarning]) == 1
    assert_equal(found, without(), exact=True)
    assert in_epochs(found[0]) == [0] * NUM_EPOCHS


def test_budgets_below_one_entry(tmp_path: Path) -> None:
    """Where no budget is large enough, the cache is off."""
    cache = in_folder(tmp_path, ram_bytes=10, disk_bytes=100)
    with pytest.warns(CacheWarning) as warned:
        found = train(cache, num_epochs=4)
    assert in_epochs(found[0]) == [0] * 4
    assert str(warned[0].message) == (
        "the cache is off: ram_bytes 10 is less than the 256 bytes of one sample's "
        "outputs and disk_bytes 100 is less than the 4352 bytes of one sample's outputs"
    )
    with pytest.warns(CacheWarning, match="ram_bytes 10 is less .* is kept there"):
        found = train(in_folder(tmp_path, ram_bytes=10), num_epochs=4)
    assert in_epochs(found[0])[3] == 32


class Centre(nn.Module):
    """Looks at all samples of a microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        """Without the mean of the samples."""
        return x - x.mean(dim=0)


def test_layers_that_mix_samples_are_not_kept(tmp_path: Path) -> None:
    """By how much is said; training goes on without the cache."""
    model = make_chain()
    model[0] = nn.Sequential(Centre(), model[0])
    with pytest.warns(CacheWarning, match=r"of 2 samples differ by .* so they cannot"):
        found = train(in_folder(tmp_path), model=model, num_epochs=4)
    assert in_epochs(found[0]) == [0] * 4
