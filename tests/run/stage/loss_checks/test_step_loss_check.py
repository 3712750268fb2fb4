"""A loss of microbatches that is not the whole batch's: an error with its size."""

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
from hocket.run.stage.loss_checks.step_loss_check import StepLossCheck
from tests.run.support.batch_losses import CLASSES, CPU, NUM, labels, over_words, scores
from tests.run.support.batch_losses import words_of_uneven_sentences as uneven
from tests.run.support.token_mean_workers import PADDING, OverWords, data, pipeline

TEXT: Final = (
    "the gradient of step 0 is 13.8% off: what is trained is 1.47613, the mean "
    "over microbatches of their losses, and the loss of these 12 samples together is "
    "1.47416. The loss divides by another number in each microbatch, as with "
    "ignore_index or class weights, or it compares samples. To train the loss of the "
    "whole batch, take loss=hocket.TokenMean{}; or loss=hocket.WholeBatch(loss) if it "
    "compares samples. If the mean over microbatches is meant, declare it: "
    "loss=hocket.PerMicrobatch(loss)"
)
HOW: Final = "(loss, count=count), where count(targets) returns what it is divided by"


def compare(loss: Any, parts: Sequence[tuple[Any, Any]], **settings: Any) -> str:
    """Check a loss as the last stage does with the first step's microbatches."""
    check = StepLossCheck(loss, partial(losses_of, loss), CPU, **settings)
    for output, targets in parts:
        check.keep(0, output, targets, len(targets))
    try:
        check.compare(0)
    except ModelError as error:
        return str(error)
    return ""


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
def test_the_error_says_the_difference_and_the_way_out(loss: Any, how: str) -> None:
    """The difference is that of gradients, for losses may be equal by chance."""
    with pipeline(loss) as refused, pytest.raises(ModelError) as caught:
        refused.step(data()[0])
    assert str(caught.value) == TEXT.format(how)


def test_later_steps_are_compared_now_and_then() -> None:
    """Past bug: the first batch alone was looked at, and may show nothing.

    Here no word of the first nine batches is ignored; the tenth is compared again. The
    steps after it are not, up to the hundredth.
    """
    loss = OverWords(ignore_index=PADDING)
    uneven_batch = data()[0]
    full = uneven_batch[0], uneven_batch[1].clamp(min=PADDING + 1)
    with pipeline(loss) as trained:
        for _ in range(9):
            trained.step(full)
        with pytest.raises(ModelError, match=r"gradient of step 9 is .*% off"):
            trained.step(uneven_batch)
    with pipeline(loss) as trained:
        for step in range(12):
            trained.step(full if step < 10 else uneven_batch)


def pearson(output: Tensor, targets: Tensor) -> Tensor:
    """One less the correlation of a batch's outputs with its targets."""
    both = torch.stack([output.flatten(), targets.flatten()])
    return 1.0 - torch.corrcoef(both)[0, 1]


def test_a_correlation_over_small_microbatches_is_refused() -> None:
    """Past bug: a warning, and training went on."""
    torch.manual_seed(0)
    parts = cut(torch.randn(12).double(), torch.randn(12).double(), 3, 3, 3, 3)
    assert "loss=hocket.WholeBatch(loss)" in compare(pearson, parts)
    assert compare(hocket.PerMicrobatch(pearson), parts) == ""


def balanced(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """A cross entropy, and how unevenly experts are chosen (a product of means)."""
    classes, gates = output
    chosen = F.one_hot(gates.argmax(1), gates.shape[1]).to(gates)
    return F.cross_entropy(classes, targets) + chosen.mean(0) @ gates.mean(0)


@pytest.mark.parametrize("num_words", [1, 3])
def test_a_balance_of_experts_is_refused(num_words: int) -> None:
    """Past bug: gates of words, (samples * words, experts), were not compared."""
    gates = scores(NUM * num_words, CLASSES).softmax(1)
    sizes = 2, 3, 1
    parts = [
        ((output, own), targets)
        for output, own, targets in zip(
            scores(NUM, CLASSES).split(sizes),
            gates.split([num_words * size for size in sizes]),
            labels(NUM).split(sizes),
            strict=True,
        )
    ]
    check = StepLossCheck(balanced, partial(losses_of, balanced), CPU)
    for output, targets in parts:
        check.keep(0, output, targets, len(targets))
    with pytest.raises(ModelError, match="% off"):
        check.compare(0)


def decayed(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """A cross entropy, and a penalty on a weight that the model returns."""
    classes, weight = output
    return F.cross_entropy(classes, targets) + weight.square().sum()


def test_a_weight_among_the_outputs_has_no_samples() -> None:
    """Also where it has a multiple of their number of rows."""
    weight = scores(NUM, CLASSES)
    sizes = 3, 3
    pairs = zip(scores(NUM, CLASSES).split(3), labels(NUM).split(3), strict=True)
    parts = [((output, weight), targets) for output, targets in pairs]
    assert len(parts) == len(sizes)
    assert compare(decayed, parts) == ""


def test_class_weights_stay_untouched_while_a_backward_reads_them() -> None:
    """The checks restore what a loss module keeps; autograd counts each write."""
    weight = torch.tensor([1.0, 9.0, 0.1, 3.0]).double()
    loss = hocket.TokenMean(OverWords(weight=weight))
    with pipeline(loss, schedule="gpipe") as trained:
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
    assert "So count(targets) of TokenMean is" in compare(wrong, UNEVEN)


def test_few_bytes_are_kept() -> None:
    """Microbatches behind that are not compared."""
    size = sum(x.nbytes for x in UNEVEN[0])
    found = compare(over_words, UNEVEN, room_bytes=size)
    assert "of these 2 samples" in found
    assert compare(over_words, UNEVEN, room_bytes=size - 1) == ""


def test_a_microbatch_without_a_target_names_the_way_out() -> None:
    """Its mean is not a number."""
    with (
        pipeline(OverWords(ignore_index=PADDING)) as refused,
        pytest.raises(hocket.NonFiniteError, match=r"hocket.TokenMean\(loss\) leaves"),
    ):
        refused.step(data()[2])
