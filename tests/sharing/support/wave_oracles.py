"""What a run in two waves must equal, from the formulas; and small models for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hocket.run.data.batch import split_batch
from hocket.sharing.waves.player import microbatch_seed

Gradients = list[Tensor | None]
WIDTH = 6


class ShortNet(nn.Module):
    """Weights of float64, and products of float32, which autocast shortens.

    So its numbers differ where autocast is forgotten, and all else is exact to 1e-10.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of 3 classes, in float64."""
        for layer in (self.first, self.last):
            x = F.linear(x.float(), layer.weight.float(), layer.bias.float()).double()
            x = torch.tanh(x) if layer is self.first else x
        return x


def make_short_net() -> ShortNet:
    """Return a model of float64 weights."""
    torch.manual_seed(0)
    return ShortNet().double()


class SmallNet(nn.Module):
    """Batch norm, dropout, a recomputed part with dropout, a weight without use."""

    def __init__(self) -> None:
        super().__init__()
        # A bias before batch norm has gradients of rounding errors, which AdamW scales.
        linear = nn.Linear(WIDTH, 8, bias=False)
        self.first = nn.Sequential(linear, nn.BatchNorm1d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh())
        self.last = nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)
        self.last_bias = self.last.bias  # tied

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of 3 classes."""
        x = F.dropout(self.first(x), 0.2, self.training)
        return self.last(checkpoint(self.second, x, use_reentrant=False))


def make_net(seed: int = 0) -> SmallNet:
    """Return a model of float64."""
    torch.manual_seed(seed)
    return SmallNet().double()


def make_batches(num: int, size: int = 12, last: int | None = None) -> list[Any]:
    """Return random batches; the last one may be smaller."""
    generator = torch.Generator().manual_seed(1)
    sizes = [size] * (num - 1) + [size if last is None else last]
    return [
        (
            torch.randn(n, WIDTH, dtype=torch.float64, generator=generator),
            torch.randint(0, 3, (n,), generator=generator),
        )
        for n in sizes
    ]


def losses(output: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return what is trained, and a number beside it."""
    return {"loss": F.cross_entropy(output, targets), "size": output.square().mean()}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer under test."""
    return torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that changes at every step."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def emulate_waves(
    batches: Sequence[Any],
    *,
    num_copies: int,
    num_parts: int,
    num_replicas: int = 1,
    clip_norm: float | None = None,
    seed: int = 0,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    make: Callable[[], nn.Module] = make_net,
    short: torch.dtype | None = None,
    make_rate: Callable[[int], float] = lambda step: 1e-2 * 0.9**step,
    after_update: Callable[[int, nn.Module], None] = lambda _, net: None,
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Train in one process, one batch after the other.

    With two copies, batch `n` is computed on copy `n % 2`, which is then updated by the
    mean over the samples of batches `n` and `n - 1` (figure 9 of Wavelet). With one, it
    is the plain loop over microbatches. The learning rate of step `n` is
    `make_rate(n)`. Forwards compute under autocast of type `short`, if it is given;
    `after_update` sees each copy's first replica once it is updated.

    Returns:
        The losses, and the state of each copy on the first replica.
    """
    copies = [[make() for _ in range(num_replicas)] for _ in range(num_copies)]
    optimizers = [[optimizer(x.parameters()) for x in nets] for nets in copies]
    before: tuple[int, Gradients] | None = None
    found = []
    for step, batch in enumerate(batches):
        which, num = step % num_copies, len(batch[0])
        with torch.autocast("cpu", short or torch.bfloat16, short is not None):
            total, sums = _gradients(copies[which], batch, num_parts, seed, step)
        mean = sums
        if num_copies == 2 and before is not None:
            mean = _mean(num, sums, *before)
        before = num, sums
        for net, steps in zip(copies[which], optimizers[which], strict=True):
            for parameter, gradient in zip(net.parameters(), mean, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
            for group in steps.param_groups:
                group["lr"] = make_rate(step)
            steps.step()
        after_update(step, copies[which][0])
        found.append(total)
    return found, [copy.deepcopy(nets[0].state_dict()) for nets in copies]


def _gradients(
    nets: Sequence[nn.Module], batch: Any, num_parts: int, seed: int, step: int
) -> tuple[float, Gradients]:
    """Return the loss of a batch, and the sum of its replicas' gradients."""
    parts = split_batch(batch, num_parts * len(nets))
    total, own = 0.0, []
    for replica, net in enumerate(nets):
        net.zero_grad()
        for i in range(replica * num_parts, (replica + 1) * num_parts):
            torch.manual_seed(microbatch_seed(seed, step, i))
            loss = losses(net(parts[i].leaves[0]), parts[i].targets)["loss"]
            loss = loss * (parts[i].num_samples / len(batch[0]))
            loss.backward()
            total += loss.item()
        own.append([p.grad for p in net.parameters()])
    return total, [_added(column) for column in zip(*own, strict=True)]


def _added(gradients: Sequence[Tensor | None]) -> Tensor | None:
    here = [x.clone() for x in gradients if x is not None]
    return sum(here[1:], start=here[0]) if here else None


def _mean(num: int, own: Gradients, num_before: int, before: Gradients) -> Gradients:
    return [
        None
        if a is None or b is None
        else (num * a + num_before * b) / (num + num_before)
        for a, b in zip(own, before, strict=True)
    ]


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the largest relative difference of two states."""
    assert list(a) == list(b)
    return max(
        float(
            (a[k].double() - b[k].double()).norm() / b[k].double().norm().clamp(1e-30)
        )
        for k in a
    )
