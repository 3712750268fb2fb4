"""WPipe's experiments on the simulator: what must be so, whatever the seconds."""

from __future__ import annotations

from functools import partial

import pytest

from bench.networks.resnext import resnext
from bench.networks.transformers import deep_bert
from bench.published import PACKAGED, kept
from bench.wpipe.experiments import (
    EXPERIMENTS,
    FLUSHED,
    ORDER,
    OVERLAPPED,
    TWO_BW,
    WPIPE,
    Experiment,
    Result,
    results,
)
from bench.wpipe.simulate import SIMULATED
from hocket.planner.candidate import DDP


def simulated(layout: str, *samples: int, num_blocks: int = 48) -> Result:
    """A BERT of this depth."""
    make = partial(deep_bert, num_blocks)
    (result,) = results((Experiment("BERT", make, layout, samples),))
    return result


def test_the_published_sizes_are_there() -> None:
    """8 V100s in one node and 64 in eight; BERT and ResNeXt by depth, fine-tuning."""
    sizes = {(x.shape.num_workers, x.num_nodes) for x in EXPERIMENTS}
    layouts = {x.layout for x in EXPERIMENTS}
    names = {x.name for x in EXPERIMENTS}

    assert sizes == {(8, 1), (64, 8)}
    assert {"8x1", "4x2", "2x4", "16x4", "8x8"} <= layouts
    assert {"BERT, 96 blocks", "BERT, 768 blocks", "ResNeXt-200"} <= names
    assert sum("fine-tuning" in name for name in names) == 4


def test_every_published_layout_is_simulated() -> None:
    """`hocket bench wpipe` has a row for each, in the order of the experiments."""
    rows = kept(PACKAGED / "wpipe.json")["tables"][0]["rows"][1:]

    assert [(row[0], row[1]) for row in rows] == [*ORDER]
    assert [(x["experiment"], x["layout"]) for x in kept(SIMULATED)["rows"]] == [*ORDER]


def test_without_a_flush_nothing_but_hops_is_lost() -> None:
    """1F1B waits for (p - 1) of 2 p - 1; 2BW and WPipe wait only for messages."""
    result = simulated("4x2", 16)
    flushed, wpipe = result.times(FLUSHED), result.times(WPIPE)

    assert flushed == pytest.approx(4 / 7, rel=0.06)
    assert wpipe == pytest.approx(1.0, rel=0.06)
    assert result.times(TWO_BW) == 1.0
    assert result.best[OVERLAPPED].num_microbatches == 6
    assert result.best[WPIPE].num_microbatches == 4


def test_wpipe_keeps_half_of_the_old_weights() -> None:
    """2BW a second copy of a device's weights, WPipe that of the front half.

    So that the fullest device holds less, where weights are most of its memory. Of
    activations WPipe holds more, on all devices but the first.
    """
    result = simulated("4x2", 1)
    two_bw, wpipe = result.best[TWO_BW], result.best[WPIPE]

    assert two_bw.version_bytes == two_bw.weight_bytes
    assert 0.5 <= wpipe.version_bytes / wpipe.weight_bytes < 0.6  # the embedding's
    assert result.alike == wpipe
    assert wpipe.peak_bytes < two_bw.peak_bytes
    assert result.memory_alike is not None
    assert result.memory_alike > wpipe.peak_bytes / two_bw.peak_bytes
    assert result.best[FLUSHED].version_bytes == 0


def test_a_sweep_takes_what_fits() -> None:
    """The largest microbatches are too many for 16 GB; smaller ones are found."""
    result = simulated("2x4", 1, 4, 512, num_blocks=24)
    limit = 16 * 2**30

    assert set(result.best) == {DDP, FLUSHED, TWO_BW, WPIPE, OVERLAPPED}
    for best in result.best.values():
        assert best.num_samples in (1, 4)
        assert best.peak_bytes < limit


def test_recomputation_leaves_wpipe_room_for_larger_microbatches() -> None:
    """Half of a device's layers are run again at a time: with less, more fits."""
    result = simulated("2x4", 2, 4, num_blocks=192)
    two_bw, wpipe = result.best[TWO_BW], result.best[WPIPE]

    assert (two_bw.recomputes, two_bw.num_samples) == (True, 2)
    assert (wpipe.recomputes, wpipe.num_samples) == (True, 4)
    assert result.memory_alike is not None
    assert result.memory_alike < 0.95
    assert wpipe.samples_per_s > 1.1 * two_bw.samples_per_s


def test_wpipe_hides_its_reductions() -> None:
    """Between nodes: the other group computes meanwhile, and 2BW has to wait."""
    asked = Experiment("ResNeXt", partial(resnext, 50), "4x16", (32,))
    (result,) = results((asked,))

    assert result.times_alike is not None
    assert result.times_alike > 1.2


def test_what_fits_nowhere_has_no_number() -> None:
    """A whole copy of 192 blocks and its state on each device is too much."""
    result = simulated("8x1", 1, num_blocks=192)

    assert DDP not in result.best
    assert result.times(DDP) is None
    assert result.times(WPIPE) is not None
