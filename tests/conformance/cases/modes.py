"""Training and evaluation mode, and `requires_grad`, changed under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from tests.conformance.script import (
    Script,
    batches,
    case,
    chain,
    mse,
    refused,
    unsuited,
)


def _normed() -> nn.Sequential:
    return chain(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))


@case("`.eval()` of a BatchNorm: its statistics freeze")
def batchnorm_eval_midway() -> Script:
    """As fine-tuning of detectors does."""

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            net[1].eval()

    return Script(_normed(), batches(), before_step=before_step, teacher_alike=False)


@case("`.eval()` of a BatchNorm before each step")
def batchnorm_eval_each_step() -> Script:
    """From the first step on: the net is made in training mode."""

    def before_step(step: int, net: Any) -> None:
        net.train()
        net[1].eval()

    return Script(_normed(), batches(), before_step=before_step, teacher_alike=False)


@case("a BatchNorm in evaluation mode from the start, trained later")
def batchnorm_train_later(**options: Any) -> Script:
    """It was put so before the pipeline was made."""

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            net[1].train()

    net = _normed()
    net.train()
    script = Script(net, batches(), before_step=before_step, teacher_alike=False)
    script.options |= options
    net[1].eval()
    return script


@case(
    "a BatchNorm in evaluation mode from the start, trained later in a stage that runs "
    "its forwards twice",
    {"freeze": unsuited("no `recompute=`")},
)
def batchnorm_train_later_recomputed() -> Script:
    """Its statistics follow a microbatch once."""
    return batchnorm_train_later.make(recompute="all")  # type: ignore[call-arg]


@case("`.eval()` of a Dropout of rate 1")
def dropout_eval_midway() -> Script:
    """Nothing goes through it, then everything."""

    def before_step(step: int, net: Any) -> None:
        net[1].train(step < 2)

    net = chain(nn.Linear(6, 8), nn.Dropout(1.0), nn.Tanh(), nn.Linear(8, 8))
    return Script(net, batches(), before_step=before_step, teacher_alike=False)


@case(
    "`.eval()` of the whole model for the last steps",
    {"freeze": refused("the model's own forward is cut apart")},
)
def whole_model_eval() -> Script:
    """It trains on, with statistics that stay."""

    def before_step(step: int, net: Any) -> None:
        net.train(step < 2)

    return Script(_normed(), batches(), before_step=before_step, teacher_alike=False)


@case("a look at the model between two steps: `.eval()`, a forward, `.train()`")
def looks_between() -> Script:
    """Trains as if nobody had looked."""
    data = batches()

    def before_step(step: int, net: Any) -> None:
        net.eval()
        with torch.no_grad():
            net(data[0][0])
        net.train()

    return Script(_normed(), data, before_step=before_step, teacher_alike=False)


class ReadsMode(nn.Module):
    """Its forward asks in which mode it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        return self.b(x) * (2.0 if self.training else 1.0)


@case("a forward that reads `self.training`")
def reads_training() -> Script:
    """Evaluation takes the other branch."""
    return Script(ReadsMode(), batches(), cut="b")


@case(
    "`.eval()` of a root whose forward reads `self.training`",
    {"freeze": refused("the model's own forward is cut apart")},
)
def root_eval_midway() -> Script:
    """The mode of the root alone; its layers have none."""

    def before_step(step: int, net: Any) -> None:
        net.train(step % 2 == 0)

    return Script(
        ReadsMode(), batches(), before_step=before_step, cut="b", teacher_alike=False
    )


@case("a layer frozen from the start")
def frozen_layer() -> Script:
    """`requires_grad_(False)` before anything is made."""
    net = chain()
    net[0].requires_grad_(requires_grad=False)
    return Script(net, batches(), frozen=("0",))


HANDS: Final = {"freeze wpipe 2bw": refused("requires_grad of")}


@case(
    "a layer that the loop freezes under way",
    {"freeze 2bw": refused("requires_grad of")},
)
def freezes_by_hand() -> Script:
    """By `requires_grad_(False)`."""

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            net[2].requires_grad_(requires_grad=False)

    return Script(chain(), batches(), before_step=before_step, teacher_alike=False)


@case(
    "layers that the loop freezes from the front, and a hook behind them",
    {**HANDS, "compile": unsuited("no `clip_norm`")},
)
def freezes_the_front() -> Script:
    """A whole stage is frozen then, and sends nothing that wants a gradient."""

    def before_step(step: int, net: Any) -> None:
        if step == 1:
            net[0].requires_grad_(requires_grad=False)
        if step == 2:
            net[1].requires_grad_(requires_grad=False)
            net[2].register_forward_hook(lambda module, args, out: out * 1.1)

    return Script(
        chain(), batches(), before_step=before_step, teacher_alike=False, clip_norm=0.1
    )


@case("a layer frozen before the first step, and unfrozen later", HANDS)
def unfreezes_again() -> Script:
    """As gradual unfreezing does; the optimizer knows it."""

    def before_step(step: int, net: Any) -> None:
        net[0].requires_grad_(requires_grad=step >= 2)

    return Script(chain(), batches(), before_step=before_step, teacher_alike=False)


@case(
    "all layers frozen under way",
    {
        "own-1 own-2 seq-1 seq-2 teacher freeze wpipe 2bw": refused("requires_grad of"),
        "compile": refused("nothing to train"),
    },
)
def freezes_all() -> Script:
    """The plain loop's backward fails."""

    def before_step(step: int, net: Any) -> None:
        net.requires_grad_(requires_grad=step < 2)

    return Script(chain(), batches(), before_step=before_step, teacher_alike=False)


@case(
    "a layer that the loop unfreezes under way",
    {"own-1 own-2 seq-1 seq-2 teacher freeze wpipe 2bw": refused("requires_grad of")},
)
def unfreezes_by_hand() -> Script:
    """As gradual unfreezing does."""

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            net[0].requires_grad_(requires_grad=True)

    net = chain()
    net[0].requires_grad_(requires_grad=False)
    return Script(net, batches(), before_step=before_step, teacher_alike=False)


@case(
    "nothing trains: all parameters are frozen",
    {
        "own-1 own-2 seq-1 seq-2 teacher freeze wpipe 2bw": refused(
            "all of the model's parameters are frozen"
        ),
        "compile": refused("or all are frozen"),
    },
)
def nothing_trains() -> Script:
    """The plain loop's backward fails."""
    net = chain()
    net.requires_grad_(requires_grad=False)
    return Script(net, batches())


def _halved(of: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss that is half as large while a module evaluates."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return mse(output, targets) * (1.0 if of.training else 0.5)

    return loss


@case("a loss that reads the mode of the model")
def loss_reads_mode() -> Script:
    """As one with label smoothing in training alone."""
    net = chain()
    return Script(net, batches(), loss=_halved(net))


@case("a loss that reads the mode of a layer, and a metric that reads another's")
def loss_reads_mode_of_layers() -> Script:
    """They belong to the first stage and to the last."""
    net = chain()
    return Script(net, batches(), loss=_halved(net[1]), metric=_halved(net[4]))


@case("the same of a layer that the loop sets to `.eval()`, and back")
def loss_reads_mode_midway() -> Script:
    """And an evaluation leaves the modes as they are."""
    net = chain()

    def before_step(step: int, net: Any) -> None:
        net[3].train(step % 2 == 0)

    return Script(net, batches(), loss=_halved(net[3]), before_step=before_step)
