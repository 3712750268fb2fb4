"""What the pipeline cannot use is refused in words, on all workers, and in time.

The jobs are forked (tests/run/support/forked.py), so that each takes a second or two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from hocket.run.cluster.launch import launch
from tests.run.support import good_input_workers as sound
from tests.run.support.failing_workers import (
    loss,
    make_batches,
    make_model,
    make_pipeline,
)
from tests.run.support.forked import run_forked
from tests.run.support.processes import none_alive_within

TIMEOUT_S: Final = 2.0  # where a worker waits in vain
CALM_TIMEOUT_S: Final = 30.0  # where none does

pytestmark = pytest.mark.timeout(120)


def answers_of(
    function: str,
    folder: Path,
    *args: Any,
    num_workers: int = 2,
    timeout_s: float = CALM_TIMEOUT_S,
) -> list[dict[str, Any]]:
    """What each worker raised."""
    outcome = run_forked(
        f"tests.run.{function}",
        str(folder),
        *args,
        num_workers=num_workers,
        folder=folder,
        timeout_s=timeout_s,
    )
    assert not outcome.reports
    assert set(outcome.output.values()) == {""}
    return [outcome.results[rank] for rank in range(num_workers)]


SETTINGS: Final = {
    "no such cut": ("ModelError", "7.linear is no module of the model; there are"),
    "order of cuts": ("ModelError", "cut points must follow the order of the model"),
    "too few cuts": ("ModelError", "1 cut points make 2 stages, the schedule has 4"),
    "too few layers": ("ModelError", "2 layers that it can be cut between, too few"),
    "replicas": ("ShapeError", "2 workers cannot form 3 equal replicas"),
    "microbatches": ("ConfigError", "num_microbatches is 0: it must be at least 1"),
    "name of the schedule": ("PlanError", "did you mean '1f1b'?"),
    "schedule for others": ("ShapeError", "3 devices, not 2 (one worker for each)"),
    "delays": ("ScheduleError", "stage 0 has delay 1: such an order needs"),
    "forward only": ("ScheduleError", "stage 0 is not trained: evaluate() runs it"),
    "accumulate and wpipe": ("ConfigError", "accumulate is 2: without flushes"),
    "float16 and wpipe": ("ConfigError", 'take "bfloat16"'),
    "max_delay and 1f1b": ("ConfigError", "max_delay 1 has no effect unless schedule"),
    "clip and an early update": (
        "ConfigError",
        "comes before gradients of",
    ),
    "tied and a late one": (
        "ModelError",
        "share 0.bias, but their delays are 0, 1: to update it for all, stage 0",
    ),
    "hook and wpipe": ("ModelError", "0.weight has a hook on its gradient, but"),
    "too few for wpipe": ("ShapeError", "needs 2 microbatches a step"),
    "too few for the overlapped": ("ShapeError", "needs 2 microbatches a step"),
    "dropped weight gradient": ("ScheduleError", "1W2 is missing, but 1I2 is there"),
    "doubled weight gradient": ("ScheduleError", "1W2 is there 2 times"),
    "small example": ("DataError", "3 samples cannot be cut into 4 microbatches"),
    "no pair": ("DataError", "a batch must be a pair (inputs, targets)"),
    "no tensor": ("DataError", "the batch holds no tensor with a batch dimension"),
    "sizes disagree": ("DataError", "disagree about its number of samples"),
    "loss per sample": ("ModelError", "'loss' must be a scalar tensor, got (4,)"),
    "loss is a number": ("ModelError", "must return a scalar tensor or a dict"),
    "output is None": ("ModelError", "the model's forward returned None"),
    "all is well": ("", ""),
}


def test_settings_are_refused_before_the_start(tmp_path: Path) -> None:
    """On every worker, with the numbers and the way out; then another can be made."""
    for answers in answers_of("support.bad_input_workers:bad_settings", tmp_path):
        assert list(answers) == list(SETTINGS)
        for name, expected in SETTINGS.items():
            check(answers[name], expected, name)


def check(reported: list[str], expected: tuple[str, str], name: str) -> None:
    """That an error is of a kind, and says something; or that there was none."""
    kind, message = reported or ("", "")
    assert kind == expected[0], (name, reported)
    assert expected[1] in message, (name, reported)


BATCHES: Final = {
    "too small": ("DataError", "3 samples cannot be cut into 4 microbatches"),
    "no pair": ("DataError", "must be a pair (inputs, targets), where"),
    "three": ("DataError", "got a tuple of 3"),
    "no values": ("DataError", "batch[1] is on the meta device, which has shapes"),
    "no tensor": ("ModelError", "args[0] is 'x', but the model was captured with"),
    "sizes disagree": ("DataError", "args[0] has 16, targets has 5"),
    "another type": ("ModelError", "args[0] is torch.float32 of shape (16, 6), but"),
    "another shape": ("ModelError", "args[0] has (5,) behind its samples, and the"),
    "another structure": (
        "ModelError",
        "example has args[0], these have args[0], args[1]",
    ),
    "by name": ("ModelError", "the example has args[0], these have x"),
    "last batch": ("DataError", "18 samples in batches of 16 leave a last batch of 2"),
}


def test_bad_batches_change_nothing(tmp_path: Path) -> None:
    """Every worker refuses them alike; afterwards training goes on as if without."""
    for answers in answers_of("support.bad_input_workers:bad_batches", tmp_path):
        for name, expected in BATCHES.items():
            check(answers[name], expected, name)
        assert answers["losses"] == answers["expected"]


LOSSES: Final = {
    "per sample": "the loss named 'loss' must be a scalar tensor, got (4,)",
    "a number": "must return a scalar tensor or a dict of named scalar tensors",
    "detached": "the loss does not depend on any weight",
    "other names": "named loss, more for microbatch 0, and loss before",
}


def test_after_an_error_nothing_more_is_done(tmp_path: Path) -> None:
    """The last stage knows what is wrong with the loss; all refuse to go on."""
    first, last = answers_of("support.bad_input_workers:bad_losses", tmp_path)
    for name, text in LOSSES.items():
        check(last[name][0], ("ModelError", text), name)
        check(first[name][0], ("WaitError", "rank 1 is gone"), name)
        for answers, kind in ((first, "WaitError"), (last, "ModelError")):
            ended = f"this pipeline has ended ({kind} in step 1): make another one"
            assert answers[name][1:] == [["RunError", ended]] * 4


DATA: Final = {
    "order": "different batches",
    "targets": "different batches",
    "batch sizes": "has a batch of",
    "lengths": "the loader of rank 0 yields 2 batches, that of rank 1 yields 1",
}


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        (["order", "batch sizes", "lengths"], {}),
        (["targets"], {"transport": "torch"}),
        (["order"], {"schedule": "wpipe"}),
    ],
)
def test_stages_with_different_data_do_not_train(
    tmp_path: Path, names: list[str], settings: dict[str, Any]
) -> None:
    """The receiver notices, and names both sides, before anything is updated."""
    first, last = answers_of(
        "support.bad_input_workers:different_data",
        tmp_path,
        names,
        settings,
        timeout_s=TIMEOUT_S,
    )
    for name, (reported, untouched) in last.items():
        case, _, _ = name.partition(",")
        check(reported, ("SchemaError", DATA[case]), name)
        assert "rank 1" in reported[1] or "ranks 1 and 0" in reported[1]
        kind = "SchemaError" if case == "lengths" else "WaitError"
        if "schedule" in settings:  # the first worker receives, too, and may notice
            kind = first[name][0][0]
            assert kind in ("SchemaError", "WaitError")
        check(first[name][0], (kind, "1"), name)
        assert untouched
        assert first[name][1]


def test_replicas_with_different_data_do_not_train(tmp_path: Path) -> None:
    """They send each other no data, and find out all the same, before any update."""
    replicas = {"num_replicas": 2}
    for answers in answers_of(
        "support.bad_input_workers:different_data", tmp_path, [*DATA], replicas
    ):
        for name, (reported, untouched) in answers.items():
            case, _, does = name.partition(", ")
            evaluates = does == "evaluate" and case != "lengths"
            text = "evaluated on different batches" if evaluates else DATA[case]
            check(reported, ("SchemaError", text), name)
            assert untouched


PIPELINES: Final = {
    "width": "ranks 0 and 1 differ in the model (digests ",
    "weights": "ranks 0 and 1 differ in the weights (digests ",
    "schedule": "ranks 0 and 1 differ in the schedule (digests ",
    "stages": "ranks 0 and 1 differ in the schedule (digests ",
    "microbatches": "ranks 0 and 1 differ in the schedule (digests ",
    "cut": "ranks 0 and 1 differ in the plan (digests ",
    "seed": "ranks 0 and 1 differ in the seed (digests 0 and 1)",
    "example": "ranks 0 and 1 differ in the model (digests ",
    "learning rate": "ranks 0 and 1 differ in the updates (digests ",
    "warm-up": "ranks 0 and 1 differ in the updates (digests ",
}


def test_different_pipelines_do_not_start(tmp_path: Path) -> None:
    """Models, weights, schedules, cuts: compared before the first step."""
    for answers in answers_of(
        "support.bad_input_workers:different_pipelines", tmp_path
    ):
        for name, text in PIPELINES.items():
            check(answers[name], ("SchemaError", text), name)
        assert answers["nothing"] == []


def test_small_batches_count_by_their_samples(tmp_path: Path) -> None:
    """A last batch in training; in evaluation also fewer samples than microbatches."""
    batches = [make_batches(1, size)[0] for size in sound.SIZES]
    model = make_model().eval()
    total = sum(loss(model(x), y).item() * len(y) for x, y in batches)
    right = sum(sound.hits(model(x), y)["hits"].item() * len(y) for x, y in batches)
    count = sum(sound.SIZES)

    for answers in answers_of(
        "support.good_input_workers:small_batches", tmp_path, num_workers=4
    ):
        assert answers["steps"] == [16, 9]
        expected = [total / count, right / count, count]
        assert answers["before"] == pytest.approx(expected, rel=1e-12)
        assert answers["changed"]


def test_random_numbers_belong_to_the_user(tmp_path: Path) -> None:
    """Steps and evaluations leave the generator alone; dropout follows the seed.

    No loss depends on the order of the work or on the cut.
    """
    for answers in answers_of("support.good_input_workers:random_numbers", tmp_path):
        losses = {name: found for name, (found, _) in answers.items()}
        assert all(kept for _, kept in answers.values())
        assert losses["1f1b"] == losses["1f1b again"]
        assert losses["1f1b"][0] != losses["1f1b, another seed"][0]
        assert losses["gpipe"] == pytest.approx(losses["1f1b"], rel=1e-12)
        assert losses["looped"] == pytest.approx(losses["interleaved"], rel=1e-12)
        assert losses["looped"] == pytest.approx(losses["1f1b"], rel=1e-12)


LOOPBACK: Final = {"0100007F", "00000000000000000000000001000000"}


def test_nothing_listens_and_nothing_is_left(
    tmp_path: Path, free_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No socket but gloo's on the loopback; no process, file or shared memory after."""
    for name in ("temporary", "run", "own"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))  # not ours
    run_dir = tmp_path / "run"
    for found in launch(
        sound.look_around, [str(tmp_path / "own")], num_workers=2, run_dir=run_dir
    ):
        assert isinstance(found, dict)
        own = found.pop("own")
        assert isinstance(own, list)
        assert set(map(str, own)) <= LOOPBACK
        assert found == {"launcher's": [], "shared": []}
    assert none_alive_within(str(tmp_path))
    assert not [*(tmp_path / "temporary").iterdir(), *run_dir.iterdir()]


def test_alone_it_leaves_no_file(
    free_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline of one device, under no launcher, in the current folder."""
    monkeypatch.setenv("TMPDIR", str(free_dir))
    batches = make_batches(2)
    with make_pipeline(make_model(), batches[0], "", profile_dir=None) as pipeline:
        losses = [result.loss for result in pipeline.train(batches)]
    assert torch.tensor(losses).isfinite().all()
    assert not list(free_dir.iterdir())
