"""Loaders of samples: batches in order, read ahead or not, and gone on from."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.errors import DataError, RunError
from hocket.run.data.reads import PartBatch, ReadSpec
from hocket.run.data.sample_loader import EvaluationLoader, SampleLoader
from hocket.run.data.samples import EpochRandom
from tests.run.support.numbered_samples import Numbered

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*multi-threaded.*:DeprecationWarning"  # from Python 3.12 on, of any fork
)


def rows_of(inputs: Tensor) -> list[int]:
    """Which samples they are of, where nothing was varied."""
    return [int(row) for row in inputs[:, 0]]


def reads_of(replica: int, num_replicas: int = 2, **sides: bool) -> ReadSpec:
    """Of a worker of one replica, two microbatches each."""
    both = {"inputs": True, "targets": True, **sides}
    return ReadSpec(
        inputs=both["inputs"],
        targets=both["targets"],
        num_microbatches=2,
        num_replicas=num_replicas,
        replica=replica,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_loader_stopped_in_an_epoch_goes_on(
    *, num_workers: int, drop_last: bool
) -> None:
    """No sample twice, none left out, each varied as it would have been: bit for bit.

    Stopped after each number of batches up to one in the second epoch, while processes
    have read further; the state has gone through a file's text.
    """

    def loader() -> SampleLoader:
        return SampleLoader(
            Numbered(11),
            4,
            seed=3,
            drop_last=drop_last,
            num_batches=5,
            num_workers=num_workers,
        )

    expected = list(loader())
    assert len(expected) == 5
    for cut in (1, 3, 4):
        first = loader()
        batches = iter(first)
        before = list(islice(batches, cut))
        second = loader()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        del batches
        assert len(second) == 5 - cut
        assert_equal(before + list(second), expected)


def assert_equal(batches: list[Any], expected: list[Any]) -> None:
    """The same tensors, to the bit."""
    for batch, other in zip(batches, expected, strict=True):
        assert torch.equal(batch[0], other[0])
        assert torch.equal(batch[1], other[1])


def test_each_epoch_has_its_own_order_and_variations() -> None:
    """And without them, samples come as they are."""
    varied = SampleLoader(Numbered(12), 12)
    (first,), (second,) = list(varied), list(varied)
    assert not torch.equal(first[0], second[0])
    assert varied.epoch == 2

    plain = SampleLoader(Numbered(12), 12, shuffle=False, varied=False)
    ((inputs, targets),) = list(plain)
    assert torch.equal(inputs, Numbered(12).inputs(torch.arange(12), None))
    assert torch.equal(targets, torch.arange(12) % 3)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_evaluation_has_each_sample_once_as_it_is(num_workers: int) -> None:
    """In order, the last batch with what is left; again from the beginning each time.

    Also when the pass before was broken off.
    """
    loader = EvaluationLoader(Numbered(10), 4, num_workers=num_workers)
    next(iter(loader))
    batches = list(loader)
    assert [rows_of(inputs) for inputs, _ in batches] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    assert len(loader) == len(batches) == 3


def test_a_worker_reads_what_it_needs() -> None:
    """Its replica's rows, and the sides that its stages take; nothing else."""
    whole = list(SampleLoader(Numbered(11), 8, drop_last=False))
    for replica in range(2):
        samples = Numbered(11)
        loader = SampleLoader(samples, 8, drop_last=False)
        parts = list(loader.parts(reads_of(replica, targets=False)))

        assert {side for side, _ in samples.read} == {"inputs"}
        for part, (inputs, _) in zip(parts, whole, strict=True):
            assert isinstance(part, PartBatch)
            assert part.num_samples == len(inputs)
            assert torch.equal(part.inputs, inputs[part.rows])
            assert part.targets is None
        num_read = sum(len(rows) for _, rows in samples.read)
        assert num_read == (6 if replica == 0 else 5)

    samples = Numbered(11)
    between = reads_of(0, inputs=False, targets=False)
    assert len(list(SampleLoader(samples, 8).parts(between))) == 1
    assert samples.read == []


def test_a_replica_without_rows_reads_nothing() -> None:
    """A last batch to evaluate may be smaller than the number of replicas."""
    samples = Numbered(5)
    loader = EvaluationLoader(samples, 4)
    parts = list(loader.parts(reads_of(2, num_replicas=3)))
    assert [part.num_samples for part in parts] == [4, 1]
    assert parts[1].inputs is None
    assert len(samples.read) == 0  # four rows go to the first two replicas


def test_the_digest_names_what_differs() -> None:
    """Rows, variations and data: each is noticed; who reads which part is not."""

    def first(loader: SampleLoader, reads: ReadSpec) -> int:
        return next(iter(loader.parts(reads))).digest

    here = first(SampleLoader(Numbered(9), 4), reads_of(0))
    assert first(SampleLoader(Numbered(9), 4), reads_of(1, inputs=False)) == here
    others = [
        SampleLoader(Numbered(9), 4, seed=1),
        SampleLoader(Numbered(9), 4, varied=False),
        SampleLoader(Numbered(9), 4, shuffle=False),
        SampleLoader(Numbered(9, fingerprint=8), 4),
    ]
    assert here not in [first(other, reads_of(0)) for other in others]


def test_the_example_moves_nothing() -> None:
    """A pipeline is made with it before the first batch, also after going on."""
    loader = SampleLoader(Numbered(10), 4)
    before = loader.state_dict()
    inputs, targets = loader.example()
    assert inputs.shape == (4, 6)
    assert targets.shape == (4,)
    assert loader.state_dict() == before


def test_random_numbers_elsewhere_are_not_touched() -> None:
    """A DataLoader of torch's draws from the global generator when it begins."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(SampleLoader(Numbered(10), 4, num_workers=1))
    list(EvaluationLoader(Numbered(10), 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_place_in_other_data_is_refused() -> None:
    """Also where they are as many."""
    state = SampleLoader(Numbered(10), 4).state_dict()
    other = SampleLoader(Numbered(10, fingerprint=255), 4)
    with pytest.raises(
        DataError,
        match="with other data \\(fingerprint 00000007, these have 000000ff\\)",
    ):
        other.load_state_dict(state)


def test_settings_without_a_batch_are_refused() -> None:
    """For training and for evaluation."""
    with pytest.raises(DataError, match="10 samples do not fill one batch of 11"):
        SampleLoader(Numbered(10), 11)
    with pytest.raises(DataError, match="the data set is empty"):
        EvaluationLoader(Numbered(0), 4)
    with pytest.raises(DataError, match="a batch of 0 samples"):
        EvaluationLoader(Numbered(10), 0)


@dataclass(frozen=True)
class Killing(Numbered):
    """Samples whose row 1 ends the process that reads it."""

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """As the kernel ends a process when memory is short."""
        if 1 in rows.tolist():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().inputs(rows, draw)


def test_the_end_of_a_reading_process_is_reported() -> None:
    """Nothing waits for it, and the message says what to look at."""
    loader = EvaluationLoader(Killing(10), 4, num_workers=1)
    with pytest.raises(
        RunError, match=r"a process that reads ahead has ended .*; num_workers is 1"
    ):
        list(loader)


@dataclass(frozen=True)
class Broken(Numbered):
    """Samples of which one cannot be read."""

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """All but row 5."""
        if 5 in rows.tolist():
            raise DataError("image 5 cannot be decoded")
        return super().inputs(rows, draw)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_while_reading_comes_as_it_is(num_workers: int) -> None:
    """Not as a traceback of another process in the message."""
    loader = EvaluationLoader(Broken(10), 4, num_workers=num_workers)
    batches: Iterator[Any] = iter(loader)
    assert rows_of(next(batches)[0]) == [0, 1, 2, 3]
    with pytest.raises(DataError) as caught:
        next(batches)
    assert str(caught.value) == "image 5 cannot be decoded"
