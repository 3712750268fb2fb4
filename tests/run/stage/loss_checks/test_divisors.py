"""What a loss divides by, compared over the microbatches of each step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hocket
from hocket.errors import ModelError
from hocket.run.data.loss import losses_of
from hocket.run.stage.loss_checks.divisors import form_of
from hocket.run.stage.loss_checks.step_loss_check import StepLossCheck
from tests.run.support.batch_losses import CLASSES, CPU, NUM, labels, over_words, scores
from tests.run.support.compared_steps import UNEVEN, cut, of_step
from tests.run.support.token_mean_workers import PADDING, OverWords, data, pipeline


@pytest.mark.parametrize(
    ("num_full", "settings", "said"),
    [
        # Between the first, the 10th and the 100th step nothing was looked at.
        (3, {}, r"step 3 is not .* is 10, and in"),
        # Nothing said what a stage that runs again divides by: it was compared whole.
        (1, {"recompute": "all"}, "step 1 is not that of the batch"),
    ],
)
def test_a_step_whose_counts_begin_to_differ_is_refused(
    num_full: int, settings: dict[str, Any], said: str
) -> None:
    """Past bugs: no word of the first batches is ignored."""
    uneven_batch = data()[0]
    full = uneven_batch[0], uneven_batch[1].clamp(min=PADDING + 1)
    with pipeline(OverWords(ignore_index=PADDING), **settings) as trained:
        for _ in range(num_full):
            trained.step(full)
        with pytest.raises(ModelError, match=said):
            trained.step(uneven_batch)


def test_a_count_of_few_bits_is_no_reason_to_refuse() -> None:
    """Past bug: 515 and 1031 words are 516 and 1032 in half precision."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def count(targets: Tensor) -> Tensor:
        return (targets >= 0).sum()

    output, targets = torch.randn(4, 600, 2).bfloat16(), torch.ones(4, 600).long()
    even = cut(output.requires_grad_(), targets, 2, 2)
    targets = targets.clone()
    targets.flatten()[515:1200] = targets.flatten()[1200 + 1031 :] = -1
    counted = hocket.TokenMean(loss, count=count)
    check = StepLossCheck(counted, partial(losses_of, counted), CPU)
    assert of_step(check, 0, even, counts=count) == ""
    assert of_step(check, 1, cut(output, targets, 2, 2), counts=count) == ""


def test_numbers_are_compared_where_nothing_is_kept() -> None:
    """Of steps between, and of microbatches that are too large; each names both."""
    even = cut(scores(NUM, NUM, CLASSES), labels(NUM, NUM), 2, 3, 1)
    check = StepLossCheck(over_words, partial(losses_of, over_words), CPU, room_bytes=0)
    assert of_step(check, 0, even) == ""
    assert of_step(check, 1, even) == ""
    assert of_step(check, 2, UNEVEN).startswith(
        "the gradient of step 2 is not that of the batch: a number in the loss of "
        "microbatch 0, what it divides by, is 3, and in that of microbatch 1 12. "
    )


def test_a_way_to_compute_that_is_new_is_compared() -> None:
    """As of a loss that begins to compare samples at its fourth step."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        value = F.mse_loss(output, targets)
        return value.sqrt() if is_late else value

    is_late = False
    parts = cut(scores(NUM, 3), torch.ones(NUM, 3), 2, 4)
    check = StepLossCheck(loss, partial(losses_of, loss), CPU)
    assert not any(of_step(check, step, parts) for step in range(3))
    is_late = True
    assert "% off" in of_step(check, 3, parts)


def test_factors_that_are_no_numbers_are_compared_each_time() -> None:
    """Weights that a loss makes of its targets may be anything."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return (output.square() * (targets / targets.mean())).mean()

    rows = torch.tensor([1.0, 2.0, 1.0, 2.0])[:, None]
    other = torch.tensor([1.0, 2.0, 3.0, 2.0])[:, None]
    check = StepLossCheck(loss, partial(losses_of, loss), CPU)
    assert of_step(check, 0, cut(scores(4, 3), rows, 2, 2)) == ""
    assert of_step(check, 1, cut(scores(4, 3), rows, 2, 2)) == ""
    assert "% off" in of_step(check, 2, cut(scores(4, 3), other, 2, 2))


def test_targets_as_they_were_given_are_known() -> None:
    """Each sample has its own; what a loss makes of them, or of another, is not."""
    output, targets = torch.ones(4, 3, requires_grad=True) * 1, torch.ones(4, 3)
    for factor, is_known in [
        (targets, True),
        (targets.view(4, 3), True),
        (targets / targets.mean(), False),
        (targets[:1], False),
        (targets[:1].expand(4, 3), False),
        (targets.clone(), False),
    ]:
        form = form_of((output * factor).mean(), (output,), targets, 1.0)
        assert bool(form.calls) is is_known, factor
