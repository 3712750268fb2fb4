"""Forms of losses and metrics: what they return, compare, and count."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from tests.conformance.script import (
    Script,
    batches,
    case,
    chain,
    mse,
    refused,
    unsuited,
)


class Weighted(nn.Module):
    """Two terms, whose weights are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        squares, sizes = mse(output, targets), (output - targets).abs().mean()
        first, second = torch.exp(-self.log_var)
        return first * squares + second * sizes + self.log_var.sum()


@case(
    "a loss module with weights of its own, clipped together with the model's",
    {"compile": unsuited("no `clip_norm`")},
)
def loss_with_weights_clipped() -> Script:
    """One norm over all of them."""
    return Script(chain(), batches(), loss=Weighted(), clip_norm=0.1)


class Centred(nn.Module):
    """Keeps a moving mean of the targets in a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.mean.lerp_(targets.mean(0), 0.1)
        return mse(output, targets - self.mean)


@case("a loss module that changes a buffer of its own")
def loss_with_buffer() -> Script:
    """As DINO's centre: once for each microbatch, as a BatchNorm does."""
    return Script(chain(), batches(), loss=Centred(), evaluates=False)


@case("the same, declared as `PerMicrobatch`")
def declared_loss_with_buffer() -> Script:
    """One change for each microbatch."""
    loss = hocket.PerMicrobatch(Centred())
    return Script(chain(), batches(), loss=loss, evaluates=False)


@case(
    "a metric that reads the model's weights",
    {"own-2 seq-2": refused("the metrics function reads 0.weight")},
)
def metric_of_weights() -> Script:
    """The absolute sum, as an evaluation reports it."""
    net = chain()

    def metric(output: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([p.abs().sum() for p in net.parameters()]).sum()

    return Script(net, batches(), metric=metric)


@case("a metric of the output")
def metric_of_output() -> Script:
    """Means over samples."""

    def metric(output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).abs().mean()

    return Script(chain(), batches(), metric=metric)


@case("a number of the loss that the loop changes")
def changing_loss() -> Script:
    """An attribute of a loss object, and a closure."""

    class Warmed:
        weight = 0.0

        def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
            return mse(output, targets) + self.weight * output.abs().mean()

    loss = Warmed()

    def before_step(step: int, net: Any) -> None:
        loss.weight = step / 2

    return Script(
        chain(), batches(), loss=loss, before_step=before_step, evaluates=False
    )


@case("a loss that returns a dict")
def dict_loss() -> Script:
    """The sum is trained, as detection models mean theirs."""

    def loss(output: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"squares": mse(output, targets), "sizes": output.abs().mean()}

    return Script(chain(), batches(), loss=loss)


@case(
    "a loss that compares the samples of a batch",
    {"own-1 own-2 seq-1 seq-2 teacher freeze wpipe 2bw": refused("compares samples")},
)
def compares_samples() -> Script:
    """The mean over microbatches is another number than that of the batch."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return mse(output, targets) - output.std(0).mean()

    return Script(chain(), batches(), loss=loss)


@case(
    "a correlation, of microbatches of 3",
    {"own-1 own-2 seq-1 seq-2 teacher freeze wpipe 2bw": refused("compares samples")},
)
def correlation() -> Script:
    """Pearson's, which is nearly a constant for so few samples."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        a, b = output - output.mean(0), targets - targets.mean(0)
        sizes = (a.square().sum(0) * b.square().sum(0)).sqrt()
        return 1 - ((a * b).sum(0) / sizes).mean()

    return Script(chain(), batches(size=6), loss=loss)


class Experts(nn.Module):
    """Mixes two layers, and returns the weights of the mixture, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate = nn.Linear(6, 8), nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 3)
        with torch.no_grad():
            self.gate.weight.mul_(10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.first(x))
        shares = self.gate(x).softmax(-1)
        both = torch.stack([expert(x) for expert in self.experts], -1)
        return self.last((both * shares[:, None]).sum(-1)), shares


@case(
    "a balance term of a mixture of experts",
    {
        "own-1 own-2 teacher wpipe 2bw": refused("compares samples"),
        "freeze": refused("experts is no place to cut at"),
    },
)
def balance_of_experts() -> Script:
    """The share of samples that prefer an expert, times its mean weight.

    The first batch has samples of both; where it has not, that of step 10 is compared.
    """
    first, *others = batches()

    def loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        found, shares = output
        preferred = F.one_hot(shares.argmax(-1), 2).double().mean(0)
        return mse(found, targets) + 0.2 * (preferred * shares.mean(0)).sum()

    return Script(Experts(), [*others, first], loss=loss, cut="last", frozen=("first",))


@case("cross entropy with label smoothing")
def cross_entropy() -> Script:
    """Targets are classes."""
    rng = torch.Generator().manual_seed(3)
    data = [(x, torch.randint(3, (8,), generator=rng)) for x, _ in batches()]

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets, label_smoothing=0.1)

    return Script(chain(), data, loss=loss)


class Balanced(nn.Module):
    """Divides by a mean of its last values, which it keeps as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = 1.0

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        value = mse(output, targets)
        self.mean = 0.9 * self.mean + 0.1 * value.item()
        return value / self.mean


@case("a loss that counts by a number of its own")
def counting_loss() -> Script:
    """The pipeline's own calls leave the number as it was."""
    return Script(chain(), batches(), loss=Balanced(), evaluates=False)


@case("the same, declared as `PerMicrobatch`")
def declared_counting_loss() -> Script:
    """The pipeline's own calls leave the number as it was."""
    loss = hocket.PerMicrobatch(Balanced())
    return Script(chain(), batches(), loss=loss, evaluates=False)


@case("a list, and a tensor beside the loss, declared as `PerMicrobatch`")
def declared_memory() -> Script:
    """A memory of outputs, and their mean."""
    memory: list[Tensor] = []
    centre = torch.zeros(3, dtype=torch.float64)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        value = mse(output - centre, targets)
        if memory:
            value = value + 0.1 * mse(output.mean(0), memory[-1])
        memory.append(output.detach().mean(0))
        centre.mul_(0.9).add_(0.1 * memory[-1])
        return value

    declared = hocket.PerMicrobatch(loss)
    return Script(chain(), batches(), loss=declared, evaluates=False)


AT_STEP: Final = {
    "own-1 own-2 seq-1 seq-2 freeze wpipe 2bw": refused("the gradient of step 3 is"),
    "teacher": refused("compares samples"),  # two means with shares of their own
}


def _classes(*, begin: int = 3, num: int = 5) -> list[tuple[Tensor, Tensor]]:
    """Batches of classes; from a step on, one half has more of class 0 than the other.

    Until then each half of a batch has two samples of it.
    """
    data = []
    for step, (x, _) in enumerate(batches(num=num)):
        of_zero = torch.tensor([1, 0, 1, 0] * 2 if step < begin else [0, 0, 0, 1] * 2)
        if step >= begin:
            of_zero[4:] = 1
        data.append((x, of_zero * torch.tensor([1, 2, 1, 2, 2, 1, 2, 1])))
    return data


@case("`ignore_index`, whose counts begin to differ", AT_STEP)
def late_ignored_targets() -> Script:
    """From the fourth step on, the mean over microbatches is not the batch's."""
    return Script(chain(), _classes(), loss=nn.CrossEntropyLoss(ignore_index=0))


@case("a mean over the samples that a mask of the targets leaves", AT_STEP)
def late_mask() -> Script:
    """By an index, as of tokens that are no padding."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        each = output.square().sum(1) + output[:, 0] * targets
        return 0.5 * each[targets > 0].mean()

    return Script(chain(), _classes(), loss=loss)


@case("a mean by weights that are made from the targets", AT_STEP)
def late_weights() -> Script:
    """A mask of numbers, over its sum; and weights that are normed before."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        mask = (targets > 0).double()
        each = (output - targets[:, None]).square().mean(1)
        return (each * mask).sum() / mask.sum() + (each * (mask / mask.mean())).mean()

    return Script(chain(), _classes(), loss=loss)


@case("a mean over fewer samples where the targets ask for it", AT_STEP)
def late_branch() -> Script:
    """All of them in the first batches, for which there is nothing to leave out."""
    data = [(x, targets + (i < 3)) for i, (x, targets) in enumerate(_classes())]

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        each = (output - targets[:, None]).square().mean(1)
        return each[targets > 0].mean() if 0 in targets else each.mean()

    return Script(chain(), data, loss=loss)


@case("a mean over the words of each sample, and over samples")
def mean_of_each_sample() -> Script:
    """Samples of other numbers of words are means over samples all the same."""
    rng = torch.Generator().manual_seed(5)
    data = [
        (x, torch.rand(8, 3, generator=rng).double() < 0.2 * i + 0.3)
        for i, (x, _) in enumerate(batches(num=5))
    ]

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        each = (output.square() * targets).sum(1)
        return (each / targets.sum(1).clamp(min=1)).mean()

    return Script(chain(), data, loss=loss)


IN_PLACE: Final = {
    "own-1 own-2 seq-1 seq-2 teacher freeze wpipe 2bw": refused("in place"),
}


@case(
    "a loss that norms its targets in place",
    {**IN_PLACE, "compile": refused("changes its batch in place")},
)
def norms_targets_in_place() -> Script:
    """By the mean of the batch; those of a microbatch are normed already."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        targets /= targets.abs().mean()
        return mse(output, targets)

    return Script(chain(), batches(), loss=loss)


@case(
    "the same, declared as `PerMicrobatch`",
    {**IN_PLACE, "compile": refused("changes its batch in place")},
)
def norms_declared_in_place() -> Script:
    """What is declared is how it is averaged, and not whose targets change."""
    loss = hocket.PerMicrobatch(norms_targets_in_place.make().loss)
    return Script(chain(), batches(), loss=loss)


@case("a loss that begins to centre the outputs in place", IN_PLACE)
def centres_outputs_in_place() -> Script:
    """From the third step on, by the mean over the samples."""
    num_seen = 0

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        nonlocal num_seen
        num_seen += torch.is_grad_enabled()
        if num_seen > 4:
            output -= output.mean(0)
        return mse(output, targets)

    return Script(chain(), batches(num=5), loss=loss, evaluates=False)


@case("a loss that changes a copy of its targets in place")
def changes_a_copy_in_place() -> Script:
    """As the error says."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        targets = targets.clone()
        targets[targets < 0] = 0.0
        return mse(output, targets)

    return Script(chain(), batches(), loss=loss)


@case("a loss that norms a NumPy array of targets in place", IN_PLACE)
def norms_an_array_in_place() -> Script:
    """The array counts no changes; torch may share its memory."""
    data = [(x, y.numpy()) for x, y in batches()]

    def loss(output: Tensor, targets: Any) -> Tensor:
        targets /= abs(targets).mean()
        return mse(output, torch.as_tensor(targets))

    return Script(chain(), data, loss=loss)
