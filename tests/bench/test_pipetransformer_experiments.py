"""PipeTransformer's experiments on the simulator: what holds whatever the seconds."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench.pipetransformer.caching import caching_rows, logged_copies
from bench.pipetransformer.experiments import (
    ALL,
    CIFAR100,
    IMAGENET,
    SQUAD,
    Modules,
    baseline,
    frozen_blocks,
    our_run,
    published_lengths,
    published_run,
)
from bench.pipetransformer.layouts import layout_rows
from bench.pipetransformer.simulate import read_measured
from bench.published import PACKAGED, kept


def speedup(*modules: bool) -> float:
    """ImageNet's, at alpha 1/3."""
    frozen = frozen_blocks(IMAGENET, 1 / 3)
    epochs = published_run(IMAGENET, frozen, Modules(*modules))
    return baseline(IMAGENET) / sum(epoch.seconds for epoch in epochs)


def test_pipelines_shorten_as_published() -> None:
    """ImageNet's throughput has steps at epochs 2, 3 and 5; SQuAD's schedule none."""
    frozen = frozen_blocks(IMAGENET, 1 / 3)
    assert published_lengths(IMAGENET, frozen) == [8, 8, 4, 2, 2, 1, 1, 1, 1, 1]
    assert frozen_blocks(SQUAD, 1 / 3, 12) == [0, 4, 7]
    assert published_lengths(SQUAD, [0, 4, 7]) == [8, 8, 8]
    assert published_lengths(SQUAD, frozen_blocks(SQUAD, 1 / 3)) == [8, 8, 4]


def test_parts_are_in_the_published_order() -> None:
    """Freezing alone is a loss; replicas bring most, and the cache more on top."""
    found = [
        speedup(False, False, False),
        speedup(True, False, True),
        speedup(True, True, False),
        speedup(True, True, True),
    ]
    assert found == sorted(found)
    assert found[0] < 1 < found[1]
    assert found[2:] == pytest.approx([2.27, 2.83], rel=0.15)


def test_smaller_alphas_are_slower() -> None:
    """As published, all within 15 %."""
    published = {1 / 2: 3.86, 2 / 5: 3.29, 1 / 3: 2.83, 1 / 4: 2.44, 1 / 5: 2.04}
    base_s = baseline(CIFAR100)
    for alpha, expected in published.items():
        epochs = published_run(CIFAR100, frozen_blocks(CIFAR100, alpha), ALL)
        found = base_s / sum(epoch.seconds for epoch in epochs)
        assert found == pytest.approx(expected, rel=0.15)


def test_caching_pays_late_as_published() -> None:
    """Figure 12, with what a logged run says of reading and storing.

    At alpha 1/5 it is slower until the fourth epoch, within 5 %, and clearly faster
    from the fifth; at larger ones it pays earlier. A boundary that stays is never slow.
    """
    by_alpha = {row.alpha: row for row in caching_rows()}
    found = by_alpha["1/5"]
    assert found.slower_until == 3
    assert found.times_as_fast[4] == pytest.approx(1.0, abs=0.05)
    assert found.clearly_faster_from == 5
    assert by_alpha["1/3"].slower_until < found.slower_until
    for row in by_alpha.values():
        changes = pairwise(row.frozen)
        for (before, now), times in zip(changes, row.times_as_fast[1:], strict=True):
            assert now > before or times > 1.0, row


def test_what_is_kept_is_read_and_stored_as_logged() -> None:
    """Both give the logged throughputs again: 4096 and 16496 images per second."""
    copies, num_bytes = logged_copies(), 320 * CIFAR100.kept_bytes
    read_s, store_s = copies.read_s * num_bytes, copies.store_s * num_bytes
    assert 16 * 320 / read_s == pytest.approx(16496)
    two_blocks_s = 2.313 * 2 / 12
    assert 16 * 320 / (read_s + store_s + two_blocks_s) == pytest.approx(4096)


def test_what_is_frozen_costs_less() -> None:
    """Steps become shorter with each epoch that freezes more, cached or not."""
    for modules in (ALL, Modules(caches=False)):
        steps = [x.step_s for x in our_run(CIFAR100, [0, 3, 6, 9, 11], modules)]
        assert steps == sorted(steps, reverse=True)


def test_some_layouts_do_not_fit() -> None:
    """On three and four devices: the largest batches, in every layout."""
    rows = [*layout_rows()]
    assert {row.num_devices for row in rows} == {3, 4}
    assert {row.batch_size for row in rows if not row.fits} == {384}
    assert {row.layout for row in rows if not row.fits} == {row.layout for row in rows}


def test_the_command_shows_what_was_measured_last() -> None:
    """`hocket bench pipetransformer` has packaged numbers; they once fell behind."""
    packaged = kept(PACKAGED / "pipetransformer.json")
    assert packaged["measured"] == read_measured()
