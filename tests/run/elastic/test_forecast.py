"""What is left of a run is predicted from what its policy will decide."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

import hocket
from hocket.freeze import Alpha, Percentile
from hocket.freeze.cache.payoff import CacheCosts
from hocket.freeze.forecast import Stretch
from hocket.freeze.shapes import Frozen
from hocket.run.data.samples import EpochRandom
from tests.run.elastic.test_refusals import batch, make_pipeline
from tests.run.support.cached_workers import Rows

NUM_STEPS = 10


class FewRows(Rows):
    """Two batches of what the pipeline's model takes."""

    def __init__(self) -> None:
        super().__init__(width=4, num_samples=16)

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """Their inputs: (B, 4), float32."""
        return super().inputs(rows, draw).float()


@pytest.mark.parametrize("every_steps", [2, None])
def test_the_steps_ahead_are_those_that_are_played(
    tmp_path: Path, every_steps: int | None
) -> None:
    """Simulated before layers freeze as after, by a decision's step or an epoch's."""
    policy = Alpha(1 / 4, every_steps=every_steps)
    with make_pipeline(tmp_path, freeze=policy) as pipeline:
        assert pipeline.seconds_left(NUM_STEPS) is None
        ahead: list[Stretch] = []
        found: list[float] = []
        for epoch in range(NUM_STEPS // 2):
            for result in pipeline.train([batch(), batch()]):
                if not ahead:
                    ahead = stretches(pipeline)
                found.append(pipeline.predicted.step_s)
                left_s = pipeline.seconds_left(NUM_STEPS)
                assert left_s is not None
                assert (left_s > 0) == (result.step + 1 < NUM_STEPS), epoch
    assert [x.begin for x in ahead] == [1, 2, 4, 6, 8][: len(ahead)]
    begins = {x.begin - (x.begin == 1): x.step_s for x in ahead}
    for step, step_s in enumerate(found):
        latest = max(begin for begin in begins if begin <= step)
        assert begins[latest] == pytest.approx(step_s), (step, begins, found)


def test_nothing_changes_once_all_layers_are_frozen(tmp_path: Path) -> None:
    """However many decisions there are to come; no change has taken time yet."""
    policy = Alpha(1 / 2, every_steps=1)
    with make_pipeline(tmp_path, freeze=policy) as pipeline:
        pipeline.step(batch())
        freezing = pipeline._freezing
        assert freezing is not None
        played = pipeline._saved.played
        found = [*freezing.ahead(1, 5_000, played)]
    assert [x.begin for x in found] == [1, 1, 2, 3, 4]  # 2, 3, 4 frozen, and again 4
    assert not any(x.change_s for x in found)


def test_the_cache_is_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past bug: unless it had been measured, all frozen layers were to run each epoch.

    In the epoch in which layers freeze first, nothing is kept yet.
    """
    at_once = property(lambda model: CacheCosts(model.num_frozen))
    monkeypatch.setattr(Frozen, "unmeasured_cache", at_once)
    loader = hocket.SampleLoader(FewRows(), 8, varied=False)
    cache = hocket.Cache(tmp_path / "cache", ram_bytes=1 << 20, disk_bytes=0)
    with make_pipeline(tmp_path, freeze=Alpha(1 / 4), cache=cache) as pipeline:
        for _ in pipeline.train(loader):
            pass
        ahead = stretches(pipeline)
        freezing = pipeline._freezing
        assert freezing is not None
        monkeypatch.setattr(freezing, "cache", None)
        plain = stretches(pipeline)
    begins = [2, 2, 4, 6, 8]  # the last freezes nothing more, and reads all
    assert [x.begin for x in ahead] == [x.begin for x in plain] == begins
    cached_s, plain_s = ([x.step_s for x in y] for y in (ahead, plain))
    assert cached_s[:2] == plain_s[:2]
    assert cached_s[2] < plain_s[2]
    assert cached_s[4] < cached_s[3] < plain_s[3]


def test_a_policy_that_measures_is_taken_to_freeze_no_more(tmp_path: Path) -> None:
    """There is one stretch."""
    with make_pipeline(tmp_path, freeze=Percentile(every_steps=1)) as pipeline:
        pipeline.step(batch())
        assert len(stretches(pipeline)) == 1


def test_a_run_without_freezing_goes_on_as_it_was(tmp_path: Path) -> None:
    """Its steps take what they took."""
    with make_pipeline(tmp_path, freeze=None) as pipeline:
        pipeline.step(batch())
        ten_s, five_s = (pipeline.seconds_left(1 + n) for n in (10, 5))
        assert five_s is not None
        assert ten_s == pytest.approx(2 * five_s)


def stretches(pipeline: hocket.Pipeline) -> list[Stretch]:
    """All that are predicted from the next step on."""
    freezing = pipeline._freezing
    assert freezing is not None
    played = pipeline._saved.played
    return [*freezing.ahead(pipeline.num_steps, NUM_STEPS, played)]


def test_another_number_of_steps_is_predicted_anew(tmp_path: Path) -> None:
    """Past bug: the stretches of a short run were taken for those of a longer one."""
    with make_pipeline(tmp_path, freeze=Alpha(1 / 4, every_steps=2)) as pipeline:
        pipeline.step(batch())
        assert pipeline.seconds_left(2) is not None
        after_another = pipeline.seconds_left(NUM_STEPS)
        pipeline._ahead.clear()
        assert pipeline.seconds_left(NUM_STEPS) == after_another
