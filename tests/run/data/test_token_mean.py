"""Microbatches weigh what their means are divided by: together the batch's loss."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hocket
from hocket.errors import ConfigError, ModelError
from hocket.run.cluster.layout import Layout
from hocket.run.data.batch import joined
from hocket.run.data.loss import losses_of, zero_losses
from hocket.run.data.step_batch import make_step_batches, with_counts

CLASSES: Final = 4
CLASS_WEIGHTS: Final = torch.tensor([0.5, 3.0, 0.0, 1.25]).double()


@given(
    sizes=st.lists(st.integers(4, 9), min_size=1, max_size=3),
    shape=st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (4, 1)]),
    weight=st.sampled_from([None, CLASS_WEIGHTS]),
    kept=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    seed=st.integers(0, 2**20),
)
def test_weighted_gradients_add_up_to_the_whole_batchs(
    sizes: list[int],
    shape: tuple[int, int],
    weight: Tensor | None,
    kept: float,
    seed: int,
) -> None:
    """Over all batches, microbatches and replicas, however few targets count in some.

    If none counts anywhere, the gradient is 0.
    """
    num_microbatches, num_replicas = shape
    rng = torch.Generator().manual_seed(seed)
    batches = []
    for size in sizes:
        label_N = torch.randint(CLASSES, (size,), generator=rng)
        label_N[torch.rand(size, generator=rng) >= kept] = -100
        score_NC = torch.randn(size, CLASSES, generator=rng, dtype=torch.float64)
        batches.append((score_NC, label_N))
    loss = hocket.TokenMean(nn.CrossEntropyLoss(weight=weight))
    score_NC, label_N = (torch.cat(x) for x in zip(*batches, strict=True))
    whole = score_NC.clone().requires_grad_()
    nn.CrossEntropyLoss(weight=weight, reduction="sum")(whole, label_N).backward()
    total = loss.count_of(label_N)
    assert whole.grad is not None
    expected = whole.grad / (total or 1.0)

    by_replica = []
    for rank in range(num_replicas):
        step = make_step_batches(
            batches,
            0,
            Layout(rank, 1, num_replicas),
            {"model": num_microbatches},
            None,
            torch.device("cpu"),
        )
        weighted = with_counts(step, "model", loss, lambda own: total)
        by_replica.append([work["model"] for work in weighted])
    found = []
    for works in zip(*by_replica, strict=True):
        for work in works:
            shares = work.shares().values()
            for part, share in zip(work.microbatches, shares, strict=True):
                score = part.leaves[0].clone().requires_grad_()
                named = losses_of(loss, score, part.targets)
                if not share:
                    named = zero_losses(named, score)
                (share * named["loss"]).backward()
                found.append(score.grad)
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-12, atol=1e-15)


def pixels(*shape: int) -> Tensor:
    """Classes, of which some are ignored."""
    return torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(1))


TARGETS: Final[dict[str, Any]] = {
    "one per sample": pixels(6),
    "one per pixel": pixels(6, 3, 2),
    "probabilities": torch.rand(6, CLASSES, dtype=torch.float64),
    "probabilities of pixels": torch.rand(6, CLASSES, 3, 2, dtype=torch.float64),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("weight", [None, CLASS_WEIGHTS])
@pytest.mark.parametrize("ignored", [-100, 1])
def test_torchs_own_losses_need_no_count(
    name: str, weight: Tensor | None, ignored: int
) -> None:
    """The sum divided by the count is torch's mean."""
    targets = TARGETS[name]
    is_mixed = targets.is_floating_point()
    others = targets.shape[2:] if is_mixed else targets.shape[1:]
    output = torch.randn(6, CLASSES, *others, dtype=torch.float64)
    make = partial(nn.CrossEntropyLoss, weight, label_smoothing=0.2)
    settings: dict[str, Any] = {} if is_mixed else {"ignore_index": ignored}
    total, mean = make(reduction="sum", **settings), make(**settings)
    count = hocket.TokenMean(mean).count_of(targets)
    torch.testing.assert_close(total(output, targets) / count, mean(output, targets))
    if not is_mixed:
        likelihood = hocket.TokenMean(nn.NLLLoss(weight, ignore_index=ignored))
        assert likelihood.count_of(targets) == count


@pytest.mark.parametrize(
    "loss", [F.cross_entropy, nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss()]
)
def test_other_losses_need_one(loss: Any) -> None:
    """What a function divides by is not known."""
    with pytest.raises(ConfigError, match=r"hocket.TokenMean\(loss, count=count\)"):
        hocket.TokenMean(loss)


@pytest.mark.parametrize("count", [-1.0, float("nan"), float("inf")])
def test_counts_are_numbers_from_0(count: float) -> None:
    """A weight below 0 would train away from a target."""
    loss = hocket.TokenMean(F.cross_entropy, count=lambda targets: count)
    with pytest.raises(ModelError, match=r"count\(targets\) is .*: it must return"):
        loss.count_of(pixels(3))


def test_an_output_that_the_loss_does_not_read_gets_no_gradient() -> None:
    """Weights behind it would otherwise decay where a plain loop leaves them alone."""
    read, unread = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    named = {"loss": (read * 0).sum() / 0, "words": torch.tensor(float("nan"))}
    zeros = zero_losses(named, {"scores": read, "more": (unread, "text")})
    assert [value.item() for value in zeros.values()] == [0.0, 0.0]
    zeros["loss"].backward()
    assert read.grad is not None
    assert read.grad.tolist() == [0.0, 0.0]
    assert unread.grad is None


def test_samples_of_lists_are_joined() -> None:
    """As the tensors beside them."""
    parts = [hocket.PerSample([1, 2]), hocket.PerSample([3])]
    assert joined([(torch.ones(2), parts[0]), (torch.ones(1), parts[1])])[1] == [
        1,
        2,
        3,
    ]
