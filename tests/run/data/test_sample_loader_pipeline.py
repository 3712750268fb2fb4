"""Loaders in a pipeline: each worker reads its part, and training is the same."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.run.cluster.world import World
from hocket.run.data.sample_loader import EvaluationLoader, SampleLoader
from tests.run.support import forked
from tests.run.support.joined import join, said
from tests.run.support.numbered_samples import Numbered
from tests.run.support.plainly import SGD
from tests.run.support.small_models import classes
from tests.run.support.started import started

NUM_SAMPLES = 40
BATCH_SIZE = 12


def begin() -> World:
    """Processes that read are forked, as in workers that the launcher starts.

    These here come from a fork server, and would ask it again: that takes seconds.
    """
    multiprocessing.set_start_method("fork", force=True)
    return join()


def make_model() -> nn.Module:
    """The same on every worker."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def accuracy(output: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The share of classes that are right."""
    return {"accuracy": (output.argmax(-1) == targets).double().mean()}


def make_loader(samples: Numbered, num_workers: int = 0) -> SampleLoader:
    """Over all samples, the last batch with what is left."""
    return SampleLoader(
        samples, BATCH_SIZE, seed=1, drop_last=False, num_workers=num_workers
    )


def make_pipeline(world: World, example: Any, num_replicas: int) -> hocket.Pipeline:
    """Two microbatches in each replica."""
    return started(
        make_model(),
        classes,
        SGD,
        example,
        num_microbatches=2 if num_replicas > 1 else 4,
        num_replicas=num_replicas,
        world=world,
    )


def in_parts(num_replicas: int, num_workers: int) -> dict[str, Any]:
    """Train an epoch and evaluate: each worker reads a part, and then whole batches."""
    world = begin()
    answers: dict[str, Any] = {}
    for way in ("parts", "whole"):
        samples, others = Numbered(NUM_SAMPLES), Numbered(7)
        loader = make_loader(samples, num_workers)
        evaluation = EvaluationLoader(others, 5)
        with make_pipeline(world, loader.example(), num_replicas) as pipeline:
            samples.read.clear()
            whole = way == "whole"
            losses = [
                result.loss
                for result in pipeline.train(list(loader) if whole else loader)
            ]
            evaluated = pipeline.evaluate(
                list(evaluation) if whole else evaluation, accuracy
            )
            state = pipeline.state_dict()
        answers[way] = {
            "losses": losses,
            "evaluated": [evaluated.loss, evaluated.metrics, evaluated.num_samples],
            "weights": {name: tensor.tolist() for name, tensor in state.items()},
            "read": samples.read,
            "place": loader.state_dict(),
        }
    return answers


def broken_off(num_workers: int) -> dict[str, Any]:
    """Stop in the middle of an epoch while processes read ahead, then go on anew."""
    world = begin()
    samples = Numbered(NUM_SAMPLES)
    first = make_loader(samples, num_workers)
    with make_pipeline(world, first.example(), 1) as pipeline:
        results = pipeline.train(first)
        before = [result.loss for result in islice(results, 2)]
        second = make_loader(samples, num_workers)
        second.load_state_dict(first.state_dict())
        after = [result.loss for result in pipeline.train(second)]
    return {"losses": before + after, "place": second.state_dict()}


def other_data() -> str:
    """Rank 1 has another version of the files."""
    world = begin()
    loader = make_loader(Numbered(NUM_SAMPLES, fingerprint=world.rank))

    def train() -> None:
        with make_pipeline(world, loader.example(), 1) as pipeline:
            list(pipeline.train(loader))

    return said(train)


def last_batch() -> str:
    """A last batch of 4 for 2 x 4 microbatches is refused before the first step."""
    world = begin()
    loader = make_loader(Numbered(NUM_SAMPLES))
    with make_pipeline(world, loader.example(), 1) as pipeline:
        too_small = SampleLoader(Numbered(26), BATCH_SIZE, drop_last=False)
        return said(lambda: next(iter(pipeline.train(too_small))))


def one_ends_early(schedule: str, ending: int, evaluates: bool) -> None:
    """One rank's batches, of unknown number, end two before the others'.

    Args:
        schedule: the order's name.
        ending: the rank whose batches end early.
        evaluates: whether that happens in an evaluation.
    """
    world = begin()
    batch = torch.ones(4, 6).double(), torch.zeros(4, dtype=torch.long)

    def batches(num: int, *, short: bool) -> Iterator[Any]:
        yield from [batch] * (num - 2 * (short and world.rank == ending))

    with started(
        make_model(), classes, SGD, batch, schedule=schedule, world=world
    ) as pipeline:
        for _ in range(2):  # the counts begin anew each time
            list(pipeline.train(batches(5, short=False)))
        pipeline.evaluate(batches(9, short=evaluates))
        list(pipeline.train(batches(9, short=True)))


pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]
TIMEOUT_S: Final = 5.0  # where a worker waits in vain


def answers_of(
    function: str, folder: Path, *args: Any, num_workers: int = 2, **more: Any
) -> list[dict[str, Any]]:
    """What each worker returned."""
    entry = f"{__name__}:{function}"
    return forked.answers_of(
        entry, *args, num_workers=num_workers, folder=folder, **more
    )


def test_first_reads_inputs_and_last_reads_targets(tmp_path: Path) -> None:
    """The stage between reads nothing; weights and losses are as from whole batches."""
    answers = answers_of("in_parts", tmp_path, 1, 0, num_workers=3)
    sides = [{side for side, _ in each["parts"]["read"]} for each in answers]
    assert sides == [{"inputs"}, set(), {"targets"}]
    for answer in answers:
        check_equal(answer)


@pytest.mark.parametrize("reading_workers", [0, 2])
def test_replicas_read_their_own_rows(tmp_path: Path, reading_workers: int) -> None:
    """Together each row once; the last batch is smaller, and so is an evaluation's."""
    answers = answers_of("in_parts", tmp_path, 2, reading_workers)
    for answer in answers:
        check_equal(answer)
    if reading_workers:  # they read in processes of their own
        return
    rows = [
        row
        for answer in answers
        for side, each in answer["parts"]["read"]
        if side == "inputs"
        for row in each
    ]
    assert sorted(rows) == list(range(40))


def check_equal(answer: dict[str, Any]) -> None:
    """All but what was read."""
    parts, whole = answer["parts"], answer["whole"]
    for name in ("losses", "evaluated", "weights", "place"):
        assert parts[name] == whole[name], name
    assert len(parts["losses"]) == 4


@pytest.mark.parametrize("reading_workers", [0, 2])
def test_training_goes_on_in_the_middle_of_an_epoch(
    tmp_path: Path, reading_workers: int
) -> None:
    """Losses as in one go; the pipeline closes though processes still read ahead."""
    folders = [tmp_path / "broken", tmp_path / "whole"]
    broken = answers_of("broken_off", folders[0], reading_workers)
    whole = answers_of("in_parts", folders[1], 1, 0)
    for answer in broken:
        assert answer["losses"] == whole[0]["parts"]["losses"]
        assert answer["place"] == whole[0]["parts"]["place"]


def test_other_data_on_one_worker_is_noticed(tmp_path: Path) -> None:
    """Though no worker sees what another has read."""
    reported = answers_of("other_data", tmp_path, timeout_s=TIMEOUT_S)
    assert any("ranks 1 and 0 have different batches" in each for each in reported), (
        reported
    )


def test_a_last_batch_too_small_is_reported_at_once(tmp_path: Path) -> None:
    """As of a DataLoader, before anything is trained."""
    for reported in answers_of("last_batch", tmp_path):
        assert "26 samples in batches of 12 leave a last batch of 2" in reported


@pytest.mark.parametrize("ending", [0, 1])
@pytest.mark.parametrize(
    ("schedule", "evaluates"),
    [("1f1b", False), ("1f1b", True), ("pipedream-2bw", False)],
)
def test_batches_that_end_early_on_one_rank_are_found_at_once(
    tmp_path: Path, schedule: str, ending: int, evaluates: bool
) -> None:
    """Not a timeout later; the error names both counts."""
    outcome = forked.run_forked(
        f"{__name__}:one_ends_early",
        schedule,
        ending,
        evaluates,
        num_workers=2,
        folder=tmp_path,
        timeout_s=50.0,
    )
    error = outcome.reports[ending]
    assert error.kind == "DataError"
    assert f"rank {ending} ended after 7 batches" in error.message
    assert f"rank {1 - ending} has yielded" in error.message
    assert "50.0 s" not in outcome.reports[1 - ending].message
