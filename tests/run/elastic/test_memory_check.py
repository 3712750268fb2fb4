"""What does not fit the memory is refused before training begins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hocket.errors import ConfigError, FitError
from hocket.freeze import Listed, Plasticity, Policy
from hocket.freeze.shapes import PipelineShape
from hocket.run.elastic.shape_choice import FreezingOptions, refuse_unfit
from tests.run.elastic.test_refusals import make_pipeline
from tests.run.elastic.test_shape_choice import (
    EXACT,
    NUM_LAYERS,
    SHAPES,
    make_choice,
    needs,
    play,
)
from tests.run.support.forked_launch import launch_forked


def check(
    policy: Policy[Any],
    memory_bytes: int,
    shapes: Mapping[int, tuple[int, int]] | None = None,
    first: PipelineShape = SHAPES[0],
) -> None:
    """Refuse what does not fit four workers.

    Raises:
        ConfigError, FitError: see `refuse_unfit`.
    """
    options, played = FreezingOptions(policy, shapes, memory_bytes), play(EXACT, first)
    choice = make_choice(options, EXACT, played)
    refuse_unfit(options, choice, played, NUM_LAYERS - 1)


def test_the_first_layout_must_fit() -> None:
    """Past bug: it was refused at the first decision, in the middle of training."""
    known = needs(0)
    asked, least = known["1x4"], known["4x1"]
    first = PipelineShape(1, 4)
    check(Plasticity(), asked.peak_bytes, first=first)
    with pytest.raises(FitError) as error:
        check(Plasticity(), asked.peak_bytes - 1, first=first)
    assert str(error.value) == (
        f"the first layout, 1x4 (stages x replicas), needs {asked.peak_bytes} bytes on "
        f"device 0, and memory_bytes is {asked.peak_bytes - 1}: begin with 4x1, which "
        f"needs the least, {least.peak_bytes} bytes: num_replicas=1, num_microbatches=4"
    )
    with pytest.raises(FitError, match=r"4x1 .* no other shape fits; give more"):
        check(Plasticity(), least.peak_bytes - 1)


def test_a_list_must_fit_all_along() -> None:
    """What it unfreezes, too: before the first step, where another policy waits."""
    most = needs(8)["1x4"].peak_bytes
    there = {8: (1, 4)}
    check(Listed({2: 8, 3: 0}), most, shapes=there)
    back = {**there, 1: (1, 4)}
    assert needs(2)["1x4"].peak_bytes > most
    check(Listed({2: 8}), most, shapes=back)
    check(Plasticity(), most, shapes=back)
    with pytest.raises(ConfigError, match=r"\(8 to 2 frozen\), and there is no way b"):
        check(Listed({2: 8, 3: 2}), most, shapes=back)
    with pytest.raises(FitError, match=r"with 2 layers frozen, 1x4 .* needs"):
        check(Listed({2: 2, 3: 8}), most, shapes=back)


def test_one_worker_is_refused_before_it_trains(tmp_path: Path) -> None:
    """By the pipeline itself, with what its plan says."""
    with make_pipeline(tmp_path) as pipeline:
        peak = round(pipeline.plan.predicted.peak_bytes(0))
    with pytest.raises(FitError, match="the first layout, 1x1") as error:
        make_pipeline(tmp_path, memory_bytes=peak // 2)
    assert error.value.needed_bytes == pytest.approx(peak, rel=1e-2)
    make_pipeline(tmp_path, memory_bytes=2 * peak).close()


def test_two_workers_begin_with_two_stages(tmp_path: Path) -> None:
    """Half-way between what 2x1 and 1x2 need, the former is accepted by both."""
    entry = "decision_workers:limit_memory"
    profiles = [str(tmp_path / "profiles")]
    for found in launch_forked(entry, profiles, num_workers=2, run_dir=tmp_path):
        assert found["2x1"] == [0, 4, 8]
        assert "FitError: the first layout, 1x2 (stages x" in found["1x2"]  # rank 0's
        assert "begin with 2x1" in found["1x2"]
