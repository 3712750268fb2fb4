"""Batches of two views: their layout, and what each worker reads of them."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.run.data.reads import PartBatch, ReadSpec
from hocket.run.data.sample_loader import EvaluationLoader
from hocket.teacher.views import TwoViewLoader
from tests.teacher.support.images import view_samples

pytest.importorskip("torchvision", reason="extra `vision`")


def test_an_epoch_has_both_views_of_each_image_once() -> None:
    """The second half of a batch has the images of the first half, in their order."""
    loader = TwoViewLoader(view_samples(7), 3, seed=1)
    seen = []
    for views, labels in loader:
        assert views.shape == (6, 3, 16, 16)
        first, second = labels.chunk(2)
        assert torch.equal(first, second)
        assert not torch.equal(*views.chunk(2))
        seen += first.tolist()
    assert len(loader) == 2
    assert len(set(seen)) == len(seen) == 6


@given(num_replicas=st.integers(1, 3), num_microbatches=st.integers(1, 2))
def test_workers_read_parts_of_one_batch(
    num_replicas: int, num_microbatches: int
) -> None:
    """A view depends on seed, epoch and image: not on the worker that makes it."""
    samples = view_samples(6)
    (whole, labels), *_ = TwoViewLoader(samples, 4, seed=1)
    parts = []
    for replica in range(num_replicas):
        reads = ReadSpec(
            True, True, num_microbatches, num_replicas, replica, torch.device("cpu")
        )
        part = next(iter(TwoViewLoader(samples, 4, seed=1).parts(reads)))
        assert isinstance(part, PartBatch)
        assert part.num_samples == 8
        assert torch.equal(part.inputs, whole[part.rows])
        assert torch.equal(part.targets, labels[part.rows])
        parts.append(part)
    assert parts[-1].rows.stop == 8
    assert len({part.digest for part in parts}) == 1


def test_goes_on_in_the_middle_of_an_epoch() -> None:
    """Its position counts images."""
    samples = view_samples(8)
    loader = TwoViewLoader(samples, 2, seed=3)
    batches = iter(loader)
    next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["position"] == 2
    second = TwoViewLoader(samples, 2, seed=3)
    second.load_state_dict(state)
    for (found, _), (expected, _) in zip(second, batches, strict=True):
        assert torch.equal(found, expected)


def test_epochs_differ() -> None:
    """Each epoch draws its own views."""
    loader = TwoViewLoader(view_samples(2), 2, shuffle=False)
    (first, _), (second, _) = *loader, *loader
    assert not torch.equal(first, second)


def test_evaluation_reads_each_image_once_and_as_it_is() -> None:
    """For k-NN and linear probes."""
    samples = view_samples(5)
    loaded = list(EvaluationLoader(samples, 2))
    views, labels = (torch.cat(x) for x in zip(*loaded, strict=True))
    assert labels.tolist() == [0, 1, 2, 3, 4]
    example, _ = TwoViewLoader(samples, 5).example()
    assert torch.equal(example, torch.cat([views, views]))
