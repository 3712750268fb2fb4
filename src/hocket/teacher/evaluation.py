"""Evaluates frozen features by a weighted k-NN classifier, which trains nothing."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hocket.errors import ConfigError, DataError
from hocket.teacher.losses.distillation import widened

_ROWS_AT_ONCE = 1024  # that are compared with all others


def knn_accuracy(
    features_ND: Tensor,
    labels_N: Tensor,
    test_features_MD: Tensor,
    test_labels_M: Tensor,
    *,
    num_neighbours: int = 20,
    temperature: float = 0.07,
) -> float:
    """Return the share of test samples that a weighted k-NN classifies rightly.

        score(c) = sum of exp(cos(x, x_i) / temperature) over neighbours i of class c

    Args:
        features_ND: features of the training samples.
        labels_N: their classes, from 0.
        test_features_MD: features of the test samples.
        test_labels_M: their classes.
        num_neighbours: k; the papers use 20 (DINO) and 200 (instance discrimination).
        temperature: 0.07 in both.

    Raises:
        ConfigError: k is not from 1 to N, or the temperature is not above 0.
        DataError: features and labels do not match.

    Sources: Wu et al., arXiv:1805.01978, section 3.4; Caron et al., arXiv:2104.14294,
    section 3.2.
    """
    _check_match(features_ND, labels_N, "the training samples")
    _check_match(test_features_MD, test_labels_M, "the test samples")
    _check_widths(features_ND.shape[1], test_features_MD)
    if not 1 <= num_neighbours <= len(features_ND) or not temperature > 0:
        raise ConfigError(
            f"k-NN with num_neighbours={num_neighbours}, temperature={temperature}: "
            f"there are {len(features_ND)} training samples; take from 1 to that many, "
            "and a temperature above 0"
        )
    known_DN = F.normalize(widened(features_ND), dim=1).T
    num_classes = int(labels_N.max()) + 1
    num_right = 0
    for some_BD, wanted_B in zip(
        F.normalize(widened(test_features_MD), dim=1).split(_ROWS_AT_ONCE),
        test_labels_M.split(_ROWS_AT_ONCE),
        strict=True,
    ):
        cosine_BK, index_BK = (some_BD @ known_DN).topk(num_neighbours)
        # Relative to the nearest, so that no exponential overflows.
        weight_BK = ((cosine_BK - cosine_BK[:, :1]) / temperature).exp()
        score_BC = weight_BK.new_zeros(len(some_BD), num_classes)
        score_BC.scatter_add_(1, labels_N[index_BK], weight_BK)
        num_right += int((score_BC.argmax(1) == wanted_B).sum())
    return num_right / len(test_labels_M)


def _check_match(features: Tensor, labels: Tensor, whose: str) -> None:
    if features.dim() != 2 or labels.shape != features.shape[:1] or not len(features):
        raise DataError(
            f"the features of {whose} are {tuple(features.shape)} and their labels "
            f"{tuple(labels.shape)}: give features (samples, width) and one class for "
            "each sample, and at least one sample"
        )


def _check_widths(width: int, features: Tensor) -> None:
    if features.shape[1:] != (width,):
        raise DataError(
            f"these features are {tuple(features.shape)}, those of the training "
            f"samples are {width} wide: take them from the same model and layer"
        )
