"""A loss of microbatches that is not the whole batch's: an error with its size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hocket
from hocket.errors import ModelError
from hocket.model.profile.allocations import allocations
from hocket.run.data.loss import PerMicrobatch, losses_of
from hocket.run.stage.loss_checks.step_loss_check import StepLossCheck
from tests.run.support.batch_losses import CLASSES, CPU, NUM, labels, over_words, scores
from tests.run.support.batch_losses import words_of_uneven_sentences as uneven
from tests.run.support.compared_steps import UNEVEN, compare, cut, of_step
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


def test_a_comparison_holds_few_times_the_outputs() -> None:
    """In float64, that is: what was tried is dropped before the next."""
    parts = cut(torch.randn(32, 4096).requires_grad_(), torch.arange(32), 8, 8, 8, 8)
    size = sum(output.nbytes for output, _ in parts)
    with allocations(CPU) as log, log.span():
        assert compare(F.cross_entropy, parts) == ""
    assert log.peaks[0] < 10 * size


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


def batch_hard(output: Tensor, targets: Tensor) -> Tensor:
    """Each sample's furthest of its class and nearest of another (1703.07737)."""
    far_BB = torch.cdist(output, output)
    alike = targets[:, None] == targets
    positive = (far_BB * alike).amax(1)
    negative = far_BB.masked_fill(alike, 1e9).amin(1)
    return F.relu(positive - negative + 1.0).mean()


def barlow_twins(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """The correlation of features over the batch (arXiv:2103.03230)."""
    a, b = ((x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-6) for x in output)
    c_DD = a.T @ b / len(a)
    return (c_DD - torch.eye(len(c_DD))).square().sum()


def root(output: Tensor, targets: Tensor) -> Tensor:
    """The root of a mean square."""
    return F.mse_loss(output, targets).sqrt()


def dice(output: Tensor, targets: Tensor) -> Tensor:
    """The overlap over all samples together."""
    p = output.sigmoid()
    return 1 - 2 * (p * targets).sum() / (p.sum() + targets.sum())


def correlation(output: Tensor, targets: Tensor) -> Tensor:
    """Pearson's, between scores and values."""
    x, y = output - output.mean(), targets - targets.mean()
    return 1 - (x * y).sum() / (x.norm() * y.norm())


OF_THE_BATCH: Final[dict[str, tuple[Any, Any, Any]]] = {
    "batch-hard triplets": (
        batch_hard,
        scores(NUM, 3),
        torch.tensor([0, 1, 0, 1, 0, 1]),
    ),
    "Barlow Twins": (barlow_twins, (scores(NUM, 3), scores(NUM, 3) + 0.3), labels(NUM)),
    "root of a mean": (root, scores(NUM, 3), torch.ones(NUM, 3)),
    "logarithm of a mean": (
        lambda output, targets: F.mse_loss(output, targets).log(),
        scores(NUM, 3),
        torch.ones(NUM, 3),
    ),
    "perplexity": (
        lambda output, targets: F.cross_entropy(output, targets).exp(),
        scores(NUM, CLASSES),
        labels(NUM),
    ),
    "dice over the batch": (dice, scores(NUM, 4), (scores(NUM, 4) > 0).float()),
    "correlation": (correlation, scores(NUM, 1), torch.arange(6.0)[:, None]),
    "variance over the batch": (
        lambda output, targets: output.var(0, unbiased=False).sum(),
        scores(NUM, 3),
        labels(NUM),
    ),
    "weights from the outputs": (
        lambda output, targets: (output.softmax(0) * (output - targets) ** 2).sum(),
        scores(NUM, 3),
        torch.ones(NUM, 3),
    ),
}


@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_losses_of_the_whole_batch_are_refused(name: str) -> None:
    """All samples twice leave these as they are; a pipeline trains other weights."""
    loss, output, targets = OF_THE_BATCH[name]
    sizes = 2, 4
    outputs: Any = output.split(sizes) if isinstance(output, Tensor) else None
    if outputs is None:
        outputs = zip(*(x.split(sizes) for x in output), strict=True)
    parts = list(zip(outputs, targets.split(sizes), strict=True))
    assert "% off" in compare(loss, parts)
    assert compare(PerMicrobatch(loss), parts) == ""


@given(
    num=st.integers(2, 9),
    num_classes=st.integers(2, 4),
    seed=st.integers(0, 2**32 - 1),
    form=st.sampled_from(["plain", "weights", "padding", "smoothing", "hinge", "two"]),
)
def test_weighted_means_pass_as_token_means(
    num: int, num_classes: int, seed: int, form: str
) -> None:
    """Weights of any size, samples without words, gradients that are zero."""
    rng = torch.Generator().manual_seed(seed)
    output = 3 * torch.randn(num, 3, num_classes, generator=rng).requires_grad_()
    targets = torch.randint(num_classes, (num, 3), generator=rng)
    weights = torch.rand(num_classes, generator=rng) * 10 + 0.1

    forms: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "plain": F.cross_entropy,
        "weights": lambda a, b: F.cross_entropy(a, b, weights.to(a.dtype)),
        "padding": lambda a, b: F.cross_entropy(a, b, ignore_index=0),
        "smoothing": lambda a, b: F.cross_entropy(a, b, label_smoothing=0.3),
        "hinge": F.multi_margin_loss,
        "two": lambda a, b: F.cross_entropy(a, b) + a.square().mean(),
    }
    counts: dict[str, Callable[[Tensor], Any]] = {
        "weights": lambda class_BT: weights[class_BT].sum(),
        "padding": lambda class_BT: (class_BT != 0).sum(),
    }
    count = counts.get(form, Tensor.numel)

    def loss(score_BTC: Tensor, class_BT: Tensor) -> Tensor:
        return forms[form](score_BTC.flatten(0, 1), class_BT.flatten())

    sizes = num // 2, num - num // 2
    counted = hocket.TokenMean(loss, count=count)
    assert compare(counted, cut(output, targets, *sizes), counts=count) == ""


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
    assert "% off" in compare(balanced, parts)


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
    loss = nn.CrossEntropyLoss(weight=None if weight is None else weight.to(half))
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
    """Of microbatches behind that, only the numbers are compared."""
    size = sum(x.nbytes for x in UNEVEN[0])
    found = compare(over_words, UNEVEN, room_bytes=size)
    assert "of these 2 samples" in found
    assert "of these 2 samples" in compare(over_words, UNEVEN, room_bytes=0)


def test_a_smaller_last_batch_is_no_difference() -> None:
    """Microbatches of other sizes, of one sample even; each counts by its samples."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        size = (output * output).sum(1)
        return 0.5 * F.mse_loss(output, targets) + (size * size).mean()

    parts = cut(scores(NUM, 3), torch.ones(NUM, 3), 3, 3)
    check = StepLossCheck(loss, partial(losses_of, loss), CPU, room_bytes=0)
    assert of_step(check, 0, parts) == ""
    assert of_step(check, 1, cut(scores(3, 3), torch.ones(3, 3), 2, 1)) == ""


def test_token_means_of_microbatches_of_other_sizes_pass() -> None:
    """Past bug: sizes of views, and of means over features, differ as samples do."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        each = output.flatten(0, 1).square().mean(-1) * 2
        return F.cross_entropy(output.flatten(0, 1), targets.flatten()) + (
            (each * (targets.flatten() >= 0)).sum() / (targets >= 0).sum()
        )

    def count(targets: Tensor) -> Tensor:
        return (targets >= 0).sum()

    counted = hocket.TokenMean(loss, count=count)
    check = StepLossCheck(counted, partial(losses_of, counted), CPU, room_bytes=0)
    assert of_step(check, 0, UNEVEN, counts=count) == ""
    assert of_step(check, 1, UNEVEN, counts=count) == ""
    assert "% off" not in (text := of_step(check, 2, UNEVEN))
    assert "microbatch 0, what it divides by, is 3, and in that of micro" in text


def test_a_microbatch_without_a_target_names_the_way_out() -> None:
    """Its mean is not a number."""
    with (
        pipeline(OverWords(ignore_index=PADDING)) as refused,
        pytest.raises(hocket.NonFiniteError, match=r"hocket.TokenMean\(loss\) leaves"),
    ):
        refused.step(data()[2])
