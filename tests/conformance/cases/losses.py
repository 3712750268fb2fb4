"""What the loss keeps and reads beside the model's output."""

from __future__ import annotations

import collections
import functools
import random
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from tests.conformance.cases.attributes import Warm
from tests.conformance.script import (
    PIPELINES,
    Script,
    batches,
    case,
    chain,
    mse,
    refused,
)

WHAT: Final = "what the loss keeps and reads"
# On several workers, and where old weights are read.
RETURNED: Final = {PIPELINES: refused("Return it from the model's forward")}
READS: Final = {"own-2 seq-2 wpipe 2bw": refused("the loss reads")}


class TaskWeights(nn.Module):
    """Two losses, weighted by their learned uncertainty."""

    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        losses = torch.stack([mse(output, targets), (output - targets).abs().mean()])
        return ((-self.log_var).exp() * losses + self.log_var).sum()


class Margin(nn.Module):
    """A projection of its own, in the manner of margin losses; and a running centre."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.project = nn.Linear(3, 3, dtype=torch.float64)
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        found = self.project(output)
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * found.detach().mean(0)
        return mse(found - self.centre, targets)


class Scaled(nn.Linear):
    """A layer, and a scale that it does not read itself."""

    def __init__(self) -> None:
        super().__init__(6, 8)
        self.scale = nn.Parameter(torch.zeros(()))


class Router(nn.Linear):
    """A layer that keeps a term for the loss."""

    aux: Tensor

    def __init__(self) -> None:
        super().__init__(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        self.aux = found.square().mean()
        return found


@case("task weights: a loss module with weights of its own")
def task_weights() -> Script:
    """Learned as the model's are."""
    return Script(chain(), batches(), loss=TaskWeights())


@case("a loss with a layer and a running buffer, under AdamW")
def margin_loss() -> Script:
    """Weights and buffers are saved under the name of the loss."""

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, 0.01)

    return Script(chain(), batches(), loss=Margin(), optimizer=adamw)


@case("a loss that is a `functools.partial` of a module with weights")
def partial_loss() -> Script:
    """What the optimizer gets is found by what the function reaches."""

    def weighted(weights: nn.Module, output: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = weights(output, targets)
        return 2 * found

    loss: Callable[..., Any] = functools.partial(weighted, TaskWeights())
    return Script(chain(), batches(), loss=loss)


def _penalty(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        sizes = [p.abs().sum() for p in net.parameters()]
        return mse(output, targets) + 0.01 * torch.stack(sizes).sum()

    return loss


@case("a penalty over the model's weights", READS)
def weight_penalty() -> Script:
    """On one worker it is right: once for each microbatch, by its share."""
    net = chain()
    return Script(net, batches(), loss=_penalty(net))


@case("the distance to the first weights, without a gradient for some", READS)
def distance_to_first() -> Script:
    """Read detached, as a factor."""
    net = chain()
    first = [p.detach().double().clone() for p in net.parameters()]

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        pairs = zip(net.parameters(), first, strict=True)
        far = sum((p.detach() - p0).square().sum() for p, p0 in pairs)
        return mse(output, targets) * (1 + far)

    return Script(net, batches(), loss=loss)


@case("a scale in the model that only the loss reads", READS)
def learned_scale() -> Script:
    """As CLIP's logit scale, read from the model."""
    net = chain(Scaled(), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    first: Any = net[0]

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return mse(first.scale.exp() * output, targets)

    return Script(net, batches(), loss=loss)


@case("a loss that begins to read weights at its third step", READS)
def late_penalty() -> Script:
    """A warm-up: the first step does not show it."""
    net, step = chain(), [0]

    def before_step(number: int, _: Any) -> None:
        step[0] = number

    penalty = _penalty(net)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return penalty(output, targets) if step[0] > 1 else mse(output, targets)

    return Script(net, batches(), loss=loss, before_step=before_step)


@case("a loss that reads a term which a module keeps", RETURNED)
def kept_term() -> Script:
    """As a router's balance term: it is to be returned."""
    net = chain(Router(), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    router: Any = net[0]

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = mse(output, targets) + 0.1 * router.aux
        return found

    return Script(net, batches(), loss=loss, evaluates=False)


@case("a loss that reads a feature which a hook keeps", RETURNED)
def hooked_feature() -> Script:
    """A style loss on features in the middle."""
    net, seen = chain(), dict[str, Tensor]()
    net[2].register_forward_hook(lambda *given: seen.update(feature=given[-1]))

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return mse(output, targets) + seen["feature"].square().mean()

    return Script(net, batches(), loss=loss, evaluates=False)


@case(
    "a loss with weights, while the loop changes a temperature in the model",
    {
        "freeze": refused("the model's own forward"),
    },
)
def weights_and_temperature() -> Script:
    """What captures the model again must keep the loss's weights."""

    def before_step(step: int, net: Any) -> None:
        net.temperature = 1 + step / 2

    return Script(Warm(), batches(), loss=Margin(), before_step=before_step, cut="b")


def _warmed(output: Tensor, targets: Tensor, num_calls: int) -> Tensor:
    """A term that comes in with the number of calls; and one for each of them."""
    return mse(output, targets) + (min(num_calls, 5) / 5) * output.abs().mean()


@case("a loss that counts its calls in a variable around it")
def counts_in_variable() -> Script:
    """The pipeline's own calls are not counted."""
    num_calls = 0

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return _warmed(output, targets, num_calls)

    return Script(chain(), batches(), loss=loss, evaluates=False)


_num_calls = 0


@case("a loss module that counts its calls in a global, and keeps its last value there")
def counts_in_global() -> Script:
    """As a script does at its top."""
    global _num_calls
    _num_calls = 0
    return Script(chain(), batches(), loss=Counting(), evaluates=False)


class Counting(nn.Module):
    """Has nothing of its own."""

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        global _num_calls
        _num_calls += 1
        return _warmed(output, targets, _num_calls)


class Trainer:
    """Whose methods are the loss and the optimizer's function."""

    all_calls = 0

    def __init__(self) -> None:
        self.num_calls = 0
        self.optimizers: list[Any] = []

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        self.num_calls += 1
        Trainer.all_calls += 1
        if not hasattr(self, "first"):
            self.first = output.detach().mean()
        value = _warmed(output, targets, self.num_calls) + Trainer.all_calls / 10
        return value * (2 + self.first)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        self.last = torch.optim.SGD(parameters, 0.1)
        self.optimizers.append(self.last)
        return self.last


@case("a trainer that counts the calls of its loss, and keeps the optimizers it makes")
def counts_in_trainer() -> Script:
    """What the optimizer's function keeps stays; numbers are as in the plain loop."""
    trainer = Trainer()
    Trainer.all_calls = 0

    def before_step(step: int, net: Any) -> None:
        assert trainer.optimizers
        assert trainer.last is trainer.optimizers[-1]

    return Script(
        chain(),
        batches(),
        loss=trainer.loss,
        optimizer=trainer.optimizer,
        before_step=before_step,
        evaluates=False,
        teacher_alike=False,
    )


@case("a loss that logs: a list, a counter, an array; and prints")
def logging_loss() -> Script:
    """One entry for each microbatch."""
    seen: dict[str, list[Any]] = {"values": []}
    counter, sums = collections.Counter[str](), np.zeros(1)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        value = mse(output, targets)
        counter["calls"] += 1
        sums[0] += 1.0
        seen["values"].append((counter["calls"], float(sums[0])))
        print(f"call {counter['calls']}")
        return value

    return Script(chain(), batches(), loss=loss, seen=seen, evaluates=False)


@case("a loss with random numbers of a generator of its own")
def drawing_loss() -> Script:
    """As negative samples are drawn; the pipeline's own calls draw others."""
    rng, numbers = torch.Generator().manual_seed(3), random.Random(4)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        noise = torch.randn(3, generator=rng, dtype=torch.float64)
        return mse(output + 0.1 * noise, targets) * (1 + numbers.random())

    return Script(chain(), batches(), loss=loss, evaluates=False)


@case("a loss with random numbers of Python and NumPy")
def drawing_loss_of_python() -> Script:
    """The loop's own seeds reach them."""

    def before_step(step: int, net: Any) -> None:
        if step == 0:
            random.seed(3)
            np.random.seed(4)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return mse(output, targets) * (random.random() + np.random.rand())

    return Script(
        chain(), batches(), loss=loss, before_step=before_step, evaluates=False
    )
