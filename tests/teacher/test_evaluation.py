"""k-NN votes as the papers write it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hocket.errors import ConfigError, DataError
from hocket.teacher.evaluation import knn_accuracy


def random_samples(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features of three overlapping classes, and the classes."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(num) % 3
    features = torch.randn(num, 4, generator=rng) + 1.5 * F.one_hot(labels, 4)
    return features, labels


@given(k=st.integers(1, 12), t=st.sampled_from([0.07, 0.5]), seed=st.integers(0, 99))
def test_knn_votes_by_hand(k: int, t: float, seed: int) -> None:
    """Section 3.4 of arXiv:1805.01978, one sample and neighbour at a time."""
    known, labels = random_samples(12, seed)
    tested, wanted = random_samples(6, seed + 1000)
    num_right = 0
    for x, label in zip(tested, wanted.tolist(), strict=True):
        cosines = [float(x @ y / x.norm() / y.norm()) for y in known]
        nearest = sorted(range(12), key=lambda i: -cosines[i])[:k]
        votes = [0.0] * 3
        for i in nearest:
            votes[int(labels[i])] += math.exp(cosines[i] / t)
        num_right += votes.index(max(votes)) == label
    found = knn_accuracy(known, labels, tested, wanted, num_neighbours=k, temperature=t)
    assert found == num_right / 6


def test_knn_takes_any_number_of_samples() -> None:
    """More than are compared at once: each is its own nearest neighbour."""
    features, labels = random_samples(2500, 0)
    assert knn_accuracy(features, labels, features, labels, num_neighbours=1) == 1.0


def test_classes_that_are_there_are_found() -> None:
    """Far above chance on new samples, below certainty: the classes overlap."""
    assert 0.6 < knn_accuracy(*random_samples(300, 0), *random_samples(300, 1)) < 0.95


def test_features_and_labels_that_do_not_match_are_refused() -> None:
    """With their shapes."""
    features, labels = random_samples(9, 0)
    for wrong in (labels[:8], labels[:, None]):
        with pytest.raises(DataError, match=r"\(9, 4\) and their labels"):
            knn_accuracy(features, labels, features, wrong)
    with pytest.raises(DataError, match=r"\(9, 2\).*4 wide"):
        knn_accuracy(features, labels, features[:, :2], labels)


def test_numbers_out_of_range_are_refused() -> None:
    """With their values, and the range."""
    features, labels = random_samples(9, 0)
    for k in (0, 10):
        with pytest.raises(ConfigError, match=rf"={k}, .*9 training samples"):
            knn_accuracy(features, labels, features, labels, num_neighbours=k)
