"""Optimizers, learning rates, clipping, and what loops do with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import hocket
from tests.conformance.script import (
    ALL,
    PIPELINES,
    Script,
    batches,
    case,
    chain,
    mse,
    refused,
    sgd,
    unsuited,
)


def _warm_up(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: (1 + step) / 4)


@case("a scheduler of the learning rate")
def scheduler() -> Script:
    """Stepped after each update."""
    return Script(chain(), batches(), scheduler=_warm_up)


@case("the learning rate of `param_groups`, set by the loop")
def rate_by_hand() -> Script:
    """The factory keeps every optimizer that it made."""
    made: list[torch.optim.Optimizer] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(sgd(parameters))
        return made[-1]

    def before_step(step: int, net: Any) -> None:
        for each in made:
            for group in each.param_groups:
                group["lr"] = 0.1 / (1 + step)

    return Script(chain(), batches(), optimizer=optimizer, before_step=before_step)


@case("a learning rate in a tensor, changed in place")
def tensor_rate() -> Script:
    """One tensor for all parameters."""
    rate = torch.tensor(0.1, dtype=torch.float64)

    def before_step(step: int, net: Any) -> None:
        rate.fill_(0.1 / (1 + step))

    return Script(
        chain(),
        batches(),
        optimizer=lambda p: torch.optim.SGD(p, lr=rate),
        before_step=before_step,
    )


@case("AdamW, groups with and without weight decay")
def parameter_groups() -> Script:
    """By the number of dimensions."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        given = list(parameters)
        groups = [
            {"params": [p for p in given if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in given if p.ndim <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.01)

    return Script(chain(), batches(), optimizer=optimizer)


@case("gradients clipped by their norm", {"compile": unsuited("no `clip_norm`")})
def clipped() -> Script:
    """`clip_norm=`, beside `clip_grad_norm_` of the loop."""
    return Script(chain(), batches(), clip_norm=0.1)


class Wave(nn.Module):
    """A layer of complex weights; real in and out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 8)
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.phase).abs()


def _waves(**options: Any) -> Script:
    net = chain(Wave(), nn.Linear(8, 8), nn.Tanh())
    script = Script(net, batches(), **options)
    net[0].phase = nn.Parameter(torch.full((8,), 0.5 + 0.5j, dtype=torch.complex128))
    return script


@case("complex weights")
def complex_weights() -> Script:
    """Phases of a wave."""
    return _waves()


@case(
    "complex weights, clipped",
    {
        "compile": unsuited("no `clip_norm`"),
    },
)
def complex_weights_clipped() -> Script:
    """Their norm counts real and imaginary parts."""
    return _waves(clip_norm=0.1)


@case("a post-step hook of the optimizer that clamps weights")
def step_hook() -> Script:
    """`register_step_post_hook`."""

    def clamp(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.2, 0.2)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = sgd(parameters)
        made.register_step_post_hook(clamp)
        return made

    return Script(chain(), batches(), optimizer=optimizer)


@case("a pre-step hook of the optimizer that changes gradients")
def step_pre_hook() -> Script:
    """`register_step_pre_hook`."""

    def sign(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.sign_()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = sgd(parameters)
        made.register_step_pre_hook(sign)
        return made

    return Script(chain(), batches(), optimizer=optimizer)


class Clips(torch.optim.SGD):
    """Clips by the norm of all gradients inside of `step()`."""

    def step(self, closure: Any = None) -> Any:
        every = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(every, 0.05)
        return super().step(closure)


@case(
    "an optimizer that clips by a global norm inside of `step()`",
    {"own-2 seq-2 wpipe": refused("the optimizer trains to other weights by stage")},
)
def clips_inside() -> Script:
    """Its step looks at all gradients."""
    return Script(chain(), batches(), optimizer=lambda p: Clips(p, lr=0.5))


class Normed(torch.optim.Optimizer):
    """Divides by the norm of all gradients; its defaults are a rate alone."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        found = [
            p for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        norm = torch.stack([p.grad.square().sum() for p in found]).sum().sqrt()
        for p in found:
            p.sub_(0.1 * p.grad / norm)


@case(
    "an optimizer that divides by the norm of all gradients",
    {"own-2 seq-2 wpipe": refused("the optimizer trains to other weights by stage")},
)
def normed_step() -> Script:
    """Its step looks at all gradients."""
    return Script(chain(), batches(), optimizer=Normed)


class Signs(torch.optim.Optimizer):
    """Takes each parameter by itself; its defaults are a rate alone."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad.sign())


@case("an optimizer of one's own")
def own_optimizer() -> Script:
    """Without torch's option `differentiable`."""
    return Script(chain(), batches(), optimizer=Signs)


@case("Adafactor")
def adafactor() -> Script:
    """Of torch."""
    return Script(
        chain(), batches(), optimizer=lambda p: torch.optim.Adafactor(p, lr=0.01)
    )


@case(
    "an optimizer that needs a closure",
    {
        "own-1 own-2 seq-1 seq-2 teacher freeze wpipe 2bw": refused(
            "its step() needs closure"
        )
    },
)
def lbfgs() -> Script:
    """L-BFGS; the plain loop here gives it none either, and fails."""

    class Once(torch.optim.LBFGS):
        def step(self, closure: Any = None) -> Any:
            given = closure or (lambda: torch.zeros(()))
            return super().step(given)  # type: ignore[no-untyped-call]

    return Script(chain(), batches(), optimizer=lambda p: Once(list(p), lr=0.1))


class Averaging(torch.optim.Optimizer):
    """Keeps two sets of weights, as schedule-free optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.is_training = True

    def train(self) -> None:
        """Exchange the weights."""
        self._put(is_training=True)

    def eval(self) -> None:
        """Exchange the weights."""
        self._put(is_training=False)

    @torch.no_grad()
    def _put(self, *, is_training: bool) -> None:
        if is_training == self.is_training:
            return
        self.is_training = is_training
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "mean" in state:
                    kept = p.clone()
                    p.copy_(state["mean"])
                    state["mean"].copy_(kept)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if not self.is_training:
            raise RuntimeError("step() in evaluation mode")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = p.clone()
                p.sub_(group["lr"] * p.grad)
                state["mean"].lerp_(p, 0.5)


@case(
    "an optimizer with `train()` and `eval()` weights",
    {
        "freeze wpipe 2bw": refused("weights to train and others to evaluate"),
    },
)
def two_modes() -> Script:
    """Evaluation and `state_dict()` take those of `eval()`."""
    return Script(chain(), batches(), optimizer=Averaging, own_alike=False)


class CountsInGroup(torch.optim.Optimizer):
    """Corrects moments by a count of the group, as schedule-free optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.state:
                    self.state[p]["mean"] = torch.zeros_like(p)
                mean = self.state[p]["mean"].lerp_(p.grad, 0.1)
                p.sub_(group["lr"] * mean / (1 - 0.9 ** group["k"]))


@case("an optimizer that counts its steps for a group")
def counts_in_group() -> Script:
    """All of its parameters are updated in each step."""
    return Script(chain(), batches(), optimizer=CountsInGroup)


@case(
    "a layer that trains again under it",
    {
        "own-1 own-2 seq-1 seq-2 compile teacher wpipe 2bw": unsuited("no `freeze=`"),
        "freeze": refused("counts in the group ('k' is 4, and 0 in a new one)"),
    },
)
def trains_again() -> Script:
    """Its moments would be corrected as if they were as old as the others."""
    policy = hocket.freeze.Listed({1: 1, 2: 0}, every_steps=2, layers="*")
    return Script(
        chain(), batches(num=6), optimizer=CountsInGroup, options={"freeze": policy}
    )


@case("SGD with momentum")
def momentum() -> Script:
    """With Nesterov's."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.05, momentum=0.9, nesterov=True)

    return Script(chain(), batches(), optimizer=optimizer)


class Words(nn.Module):
    """Sums words of a sparse embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 8, sparse=True, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        return self.bag(x)


@case("sparse gradients of an embedding")
def sparse_gradients() -> Script:
    """With plain SGD."""
    rng = torch.Generator().manual_seed(3)
    data = [(torch.randint(11, (8, 5), generator=rng), y) for _, y in batches()]
    return Script(chain(Words(), nn.Linear(8, 8), nn.Tanh()), data, loss=mse)


class Lingers(torch.optim.SGD):
    """Keeps half of the gradients for the next step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)


@case(
    "an optimizer whose `zero_grad()` keeps half of the gradients",
    {ALL: refused("Lingers.zero_grad() keeps gradients behind the update")},
)
def zero_grad_of_its_own() -> Script:
    """The plain loop calls it behind each update."""
    return Script(chain(), batches(), optimizer=lambda p: Lingers(p, lr=0.1))


class Counts(torch.optim.SGD):
    """Clears gradients in place, and notes that it does."""

    def __init__(self, parameters: Any, seen: list[Any]) -> None:
        super().__init__(parameters, 0.1)
        self.seen = seen

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)
        self.seen.append(len(self.param_groups))


@case(
    "an optimizer whose `zero_grad()` sets gradients to 0, and notes its calls",
    {"wpipe": unsuited("two stages, with an optimizer each")},
)
def zero_grad_in_place() -> Script:
    """Called once behind each update."""
    seen: dict[str, list[Any]] = {"calls": []}
    return Script(
        chain(), batches(), optimizer=lambda p: Counts(p, seen["calls"]), seen=seen
    )


@case("a group of parameters, whose rate the loop sets to 0")
def rate_of_a_group() -> Script:
    """Biases stay as they are from the third step on."""
    made: list[torch.optim.Optimizer] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        given = list(parameters)
        groups = [
            {"params": [p for p in given if p.ndim > 1]},
            {"params": [p for p in given if p.ndim <= 1]},
        ]
        made.append(torch.optim.SGD([g for g in groups if g["params"]], lr=0.1))
        return made[-1]

    def before_step(step: int, net: Any) -> None:
        for each in made:
            each.param_groups[-1]["lr"] = 0.1 if step < 2 else 0.0

    return Script(chain(), batches(), optimizer=optimizer, before_step=before_step)


@case(
    "a schedule that is made together with the optimizer",
    {PIPELINES: refused("makes a learning-rate schedule")},
)
def own_schedule() -> Script:
    """The loop steps it."""
    made: list[LRScheduler] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        found = torch.optim.SGD(parameters, 0.1)
        made.append(_warm_up(found))
        return found

    def after_step(step: int, net: Any) -> None:
        for one in made:
            one.step()

    return Script(chain(), batches(), optimizer=optimizer, after_step=after_step)


@case(
    "an update in a post-accumulate-grad hook",
    {PIPELINES: refused("a hook")},
)
def update_in_backward() -> Script:
    """As an optimizer whose update is fused into the backward."""
    net = chain()

    def update(p: Tensor) -> None:
        with torch.no_grad():
            p.sub_(0.05 * p.grad if p.grad is not None else 0.0)
        p.grad = None

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(update)
    return Script(net, batches())
