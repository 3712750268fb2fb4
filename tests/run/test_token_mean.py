"""A mean over targets that count, in a pipeline: the plain loop over whole batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

import hocket
from hocket.errors import ConfigError
from hocket.run.engine.programs.by_net import NetArguments
from hocket.run.engine.programs.nets import ProgramNets
from tests.run.support.forked import CALM_TIMEOUT_S, answers_of, run_forked
from tests.run.support.token_mean_workers import (
    LOSSES,
    NONE,
    adamw,
    data,
    evaluate_plainly,
    make_model,
    train_plainly,
)
from tests.run.support.whole_batch_workers import sums_of

ENTRY: Final = "token_mean_workers:train"


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """To rounding in the order of additions."""
    assert found["weights"] == pytest.approx(expected["weights"], rel=1e-10)
    assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-10)
    for own, other in zip(found["losses"], expected["losses"], strict=True):
        assert own == pytest.approx(other, rel=1e-10)


@pytest.mark.parametrize(
    ("name", "num_workers", "settings", "reads"),
    [
        ("ignore_index", 2, {}, "parts"),
        ("class weights", 2, {"accumulate": 2, "recompute": "all"}, "batches"),
        ("counted by hand", 2, {"schedule": "zb-h1", "clip_norm": 0.05}, "batches"),
        ("class weights", 4, {"num_replicas": 2, "clip_norm": 0.05}, "parts"),
        ("counted by hand", 2, {"num_replicas": 2, "num_microbatches": 1}, "batches"),
    ],
)
def test_equals_the_plain_loop_over_whole_batches(
    name: str, num_workers: int, settings: dict[str, Any], reads: str, tmp_path: Path
) -> None:
    """Weights after 20 steps of AdamW, losses of each step, the loss of an evaluation.

    Some microbatches have no word; one batch has none at all, and another one has some
    in one sample: there a replica has none.
    """
    answers = answers_of(
        ENTRY, name, settings, reads, num_workers=num_workers, folder=tmp_path
    )
    expected = train_plainly(
        name, settings.get("accumulate", 1), settings.get("clip_norm", float("inf"))
    )
    for found in answers:
        assert_equal(found, expected)
        assert set(found["of nothing"].values()) == {0.0}
        if "accumulate" not in settings:
            assert found["losses"][NONE]["loss"] == 0.0


@pytest.mark.parametrize("settings", [{}, {"num_replicas": 2, "num_microbatches": 1}])
def test_the_first_step_is_refused_without_it(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """By the last stage, or by a replica of it; the other worker ends, too."""
    outcome = run_forked(
        "token_mean_workers:train_inexactly",
        settings,
        folder=tmp_path,
        timeout_s=CALM_TIMEOUT_S,
    )
    assert set(outcome.reports) == {0, 1}
    refused = [x for x in outcome.reports.values() if x.kind == "ModelError"]
    assert any("hocket.TokenMean(loss)" in x.message for x in refused)


def test_copies_are_refused() -> None:
    """Their counts would have to be added up over nets."""
    order = hocket.make_schedule(
        "chimera", num_devices=2, num_microbatches=4, stages_per_device=2
    )
    with pytest.raises(ConfigError, match="take replicas"):
        ProgramNets(
            order.program,
            NetArguments.of(
                order.program,
                make_model(),
                LOSSES["ignore_index"](),
                adamw,
                cut_at=[],
                schedulers=None,
                clip_norm=None,
            ),
            data()[0],
        )


@pytest.mark.parametrize(
    ("schedule", "num_replicas", "clip_norm"),
    [("pipedream-2bw", 2, None), ("wpipe", 1, 0.05)],
)
def test_orders_that_never_flush_equal_the_emulator(
    schedule: str, num_replicas: int, clip_norm: float | None, tmp_path: Path
) -> None:
    """Old weights change what is computed, and not what a microbatch weighs."""
    name, num_workers = "class weights", 2 * num_replicas
    shape = {"num_microbatches": 2, "num_replicas": num_replicas}
    settings = {"schedule": schedule, "clip_norm": clip_norm, **shape}
    answers = answers_of(
        ENTRY, name, settings, num_workers=num_workers, folder=tmp_path
    )
    model = make_model()
    order = hocket.make_schedule(schedule, num_devices=2, num_steps=6, **shape)
    losses = hocket.emulate(
        order.program,
        model,
        LOSSES[name](),
        adamw,
        data(),
        cut_at=answers[0]["cut at"],
        clip_norm=clip_norm,
    )
    expected = {
        "losses": losses,
        "weights": sums_of(model.state_dict()),
        "evaluated": evaluate_plainly(name, model),
    }
    for found in answers:
        assert_equal(found, expected)
