"""A batch of scores and targets, and a loss checked as the last stage does it."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.run.data.loss import losses_of
from hocket.run.stage.loss_checks.step_loss_check import check_mean

CPU: Final = torch.device("cpu")
NUM: Final = 6
CLASSES: Final = 5


def look(loss: Any, output: Any, targets: Any, num_samples: int = NUM) -> None:
    """Check a loss as the last stage does with its first microbatch."""
    named = partial(losses_of, loss)
    check_mean(loss, named, output, targets, num_samples, device=CPU)


def scores(*shape: int) -> Tensor:
    """What a model returned."""
    rng = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=rng).requires_grad_()


def labels(*shape: int) -> Tensor:
    """Classes, most of them there."""
    rng = torch.Generator().manual_seed(2)
    return torch.randint(CLASSES, shape, generator=rng)


def words_of_uneven_sentences() -> Tensor:
    """Words, and padding of -100: of 1 to 6 words."""
    word_BT = labels(NUM, NUM)
    word_BT[torch.arange(NUM)[:, None] < torch.arange(NUM)] = -100
    return word_BT


def over_words(score_BTV: Tensor, word_BT: Tensor) -> Tensor:
    """A mean over all words that are none of the padding."""
    return F.cross_entropy(score_BTV.flatten(0, 1), word_BT.flatten())
