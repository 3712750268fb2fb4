"""A loss of microbatches that is not the whole batch's: a warning with its size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.errors import ModelError
from hocket.run.data.loss import losses_of
from hocket.run.stage.loss_checks.step_loss_check import (
    InexactLossWarning,
    StepLossCheck,
)
from tests.run.support.batch_losses import CLASSES, CPU, NUM, labels, over_words, scores
from tests.run.support.batch_losses import words_of_uneven_sentences as uneven
from tests.run.support.token_mean_workers import PADDING, OverWords, data, pipeline

TEXT: Final = (
    "the gradient of the first step is 13.8% off: what is trained is 1.47613, the mean "
    "over microbatches of their losses, and the loss of these 12 samples together is "
    "1.47416. The loss divides by another number in each microbatch, as with "
    "ignore_index or class weights, or it compares samples. To train the loss of the "
    "whole batch, take loss=hocket.TokenMean{}; or loss=hocket.WholeBatch(loss) if it "
    "compares samples. If this is meant, take loss=hocket.PerMicrobatch(loss)"
)
HOW: Final = "(loss, count=count), where count(targets) returns what it is divided by"


def compare(loss: Any, parts: Sequence[tuple[Any, Any]], **settings: Any) -> str:
    """Check a loss as the last stage does with the first step's microbatches."""
    check = StepLossCheck(loss, partial(losses_of, loss), CPU, **settings)
    for output, targets in parts:
        check.keep(output, targets, len(targets))
    return check.compare()


def cut(output: Tensor, targets: Tensor, *sizes: int) -> list[tuple[Tensor, Tensor]]:
    """Cut a batch into microbatches."""
    return list(zip(output.split(sizes), targets.split(sizes), strict=True))


UNEVEN: Final = cut(scores(NUM, NUM, CLASSES), uneven(), 2, 3, 1)


@pytest.mark.parametrize(
    ("loss", "how"),
    [
        (OverWords(ignore_index=PADDING), "(loss)"),
        (lambda *given: OverWords(ignore_index=PADDING)(*given), HOW),
    ],
)
def test_the_warning_says_the_difference_and_the_way_out(loss: Any, how: str) -> None:
    """Once; the difference is that of gradients, for losses may be equal by chance."""
    with pipeline(loss) as trained:
        with pytest.warns(InexactLossWarning) as seen:
            trained.step(data()[0])
        trained.step(data()[1])
    assert [str(warning.message) for warning in seen] == [TEXT.format(how)]


def test_class_weights_stay_untouched_while_a_backward_reads_them() -> None:
    """The checks restore what a loss module keeps; autograd counts each write."""
    loss = OverWords(weight=torch.tensor([1.0, 9.0, 0.1, 3.0]).double())
    with pipeline(loss, schedule="gpipe") as trained, pytest.warns(InexactLossWarning):
        assert trained.step(data()[0]).step == 0


def mean_over_samples(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over the words of each sample, and then over samples."""
    each = F.cross_entropy(output.transpose(1, 2), targets, reduction="none")
    return (each.sum(1) / (targets >= 0).sum(1)).mean()


def noisy(output: Tensor, targets: Tensor) -> Tensor:
    """A loss that draws random numbers."""
    return over_words(F.dropout(output), targets)


@pytest.mark.parametrize(
    "loss",
    [
        mean_over_samples,
        hocket.TokenMean(over_words, count=lambda targets: (targets >= 0).sum()),
        hocket.PerMicrobatch(over_words),
        noisy,
    ],
)
def test_what_is_exact_or_declared_passes(loss: Any) -> None:
    """As does what cannot be compared."""
    assert compare(loss, UNEVEN) == ""


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 9.0, 0.1, 3.0, 2.0])])
def test_it_finds_the_same_in_any_type(
    half: torch.dtype, weight: Tensor | None
) -> None:
    """Compared in float32; class weights, too."""
    loss = nn.CrossEntropyLoss(weight=weight)
    parts = cut(scores(NUM, CLASSES).to(half), labels(NUM), 2, 3, 1)
    assert bool(compare(loss, parts)) is (weight is not None)


def test_equal_losses_with_other_gradients_are_found() -> None:
    """As of a model whose last layer starts with zeros."""
    parts = [(torch.zeros_like(output), targets) for output, targets in UNEVEN]
    assert "what is trained is 1.60944" in compare(over_words, parts)


def test_a_single_microbatch_is_cut_in_two() -> None:
    """As where each replica has one, or where shapes differ."""
    ((output, targets),) = whole = cut(scores(NUM, NUM, CLASSES), uneven(), NUM)
    assert f"of these {NUM} samples" in compare(over_words, whole)
    longer = output.repeat(1, 2, 1), targets.repeat(1, 2)
    assert f"of these {NUM} samples" in compare(over_words, [*whole, longer])
    assert compare(over_words, UNEVEN[2:]) == ""  # one sample


def test_a_wrong_count_is_refused() -> None:
    """It would train another loss than the declared one."""
    wrong = hocket.TokenMean(over_words, count=Tensor.numel)
    with pytest.raises(
        ModelError, match=r"% off.* So count\(targets\) of TokenMean is"
    ):
        compare(wrong, UNEVEN)


def test_few_bytes_are_kept() -> None:
    """Microbatches behind that are not compared."""
    size = sum(x.nbytes for x in UNEVEN[0])
    found = compare(over_words, UNEVEN, _room_bytes=size)
    assert "of these 2 samples" in found
    assert compare(over_words, UNEVEN, _room_bytes=size - 1) == ""


def test_a_microbatch_without_a_target_names_the_way_out() -> None:
    """Its mean is not a number."""
    with (
        pipeline(OverWords(ignore_index=PADDING)) as refused,
        pytest.raises(hocket.NonFiniteError, match=r"hocket.TokenMean\(loss\) leaves"),
    ):
        refused.step(data()[2])
