"""Detects losses that compare samples with each other, before training starts.

A pipeline computes the loss of each microbatch, and adds these up by samples. That is
the batch's loss if the loss is a mean over samples. One that compares them (contrastive
losses, statistics of the batch) is another one then, which depends on how many
microbatches there are:

    CLIP's loss of 8 samples               each of 8 against 7 others
    mean of its losses of 4 and 4 samples  each of 8 against 3 others

They are distinguished by some samples and the same samples twice:

    loss                                  a, b       a, b, a, b
    mean over samples, words, weights     (a+b)/2    the same
    mean over words that are not padding  the same, for each word is there twice
    sum over samples                      a+b        twice as much
    compares samples                      against 1  against 3

so that a weighted mean passes, also over classes with weights or over the words of
uneven sentences (`ignore_index`). `step_loss_check.py` then compares the gradients of
the microbatches, and finds what this does not show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from hocket.errors import ModelError
from hocket.run.data.loss import LossFunction, PerMicrobatch
from hocket.run.stage.loss_checks.trial import LossTrial, restored_attributes
from hocket.run.stage.seed import preserve_generators, seed_generators

_MOST: Final = 4  # samples that are tried


def check_mean(
    loss: LossFunction,
    named: Callable[[Any, Any], Mapping[str, Tensor]],
    output: Any,
    targets: Any,
    num_samples: int,
    *,
    device: torch.device,
) -> None:
    """Refuse a loss that is no mean over samples.

    Losses that cannot be tried are accepted: outputs whose first dimension is not
    the samples', losses that draw random numbers or depend on the order of samples,
    and those that do not run with other numbers of samples.

    Args:
        loss: the user's loss function.
        named: computes the named losses of outputs and targets.
        output: the model's output for one microbatch.
        targets: the targets of that microbatch.
        num_samples: samples of that microbatch.
        device: the outputs' device.

    Raises:
        ModelError: it compares samples with each other, or is a sum; names the numbers.
    """
    if isinstance(loss, PerMicrobatch):
        return
    num = min(num_samples, _MOST)
    rows = torch.arange(num)
    trial = LossTrial(named, output, targets, num_samples)
    with preserve_generators(device), restored_attributes(loss), torch.no_grad():
        seed_generators(device, 0)
        once = trial.loss_of(rows)
        twice = trial.loss_of(torch.cat([rows, rows]))
        seed_generators(device, 1)
        backwards = trial.loss_of(rows.flip(0))
        if once is None or twice is None or backwards is None:
            return
        if not _is_near(once, backwards):
            return
        if not _is_near(once, twice):
            raise ModelError(_text(_as_often(once, twice, num)))


def _is_near(a: Tensor, b: Tensor) -> bool:
    """Return whether two losses differ by no more than rounding."""
    least = math.sqrt(torch.finfo(a.dtype).eps)
    return bool((a - b).abs() <= least * torch.maximum(a.abs(), b.abs()))


def _as_often(once: Tensor, twice: Tensor, num: int) -> str:
    """Describe a loss that changes when all samples are there twice."""
    samples = "1 sample" if num == 1 else f"{num} samples"
    numbers = (
        f"loss(output, targets) of {samples} is {once.item():.6g}, and of the same "
        f"{samples} twice {twice.item():.6g}: it "
    )
    is_sum = _is_near(2 * once, twice)
    return f"{numbers}is a sum over samples, or " if is_sum else numbers


def _text(numbers: str) -> str:
    return (
        f"{numbers}compares samples with each other. A pipeline computes it "
        "for each microbatch by itself, which is not the loss of the whole batch. "
        "Return the mean of what each sample costs for itself; or have it computed "
        "over the batch, with all microbatches alive at once: "
        "loss=hocket.WholeBatch(loss); or leave the batch "
        "whole (num_microbatches=1, num_replicas=1, accumulate=1); or, if it is "
        "enough to compare the samples of one microbatch, declare it: "
        "loss=hocket.PerMicrobatch(loss)"
    )
