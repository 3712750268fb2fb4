"""What users may ask of training is looked at before anything begins."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import nn

import hocket
from hocket.errors import ConfigError, ModelError
from hocket.options import PrecisionName
from hocket.run.stage.precision import Precision
from hocket.run.weights.settings import Parameters, TrainingConfig


def sgd(parameters: Parameters) -> torch.optim.Optimizer:
    """Any optimizer."""
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"clip_norm": float("nan")}, "clip_norm is nan"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"ema_decay": 1.0}, "ema_decay is 1.0"),
        ({"ema_decay": -0.1, "accumulate": 0}, "accumulate is 0.*; ema_decay is -0.1"),
        ({"precision": "half"}, "'half': it may be float32, bfloat16, float16"),
    ],
)
def test_refuses_values_that_make_no_sense(settings: dict[str, Any], said: str) -> None:
    """Before the model is captured, or the job is joined."""
    with pytest.raises(ConfigError, match=said):
        hocket.Pipeline(
            nn.Linear(2, 2),
            nn.functional.mse_loss,
            optimizer=sgd,
            example=(torch.ones(8, 2), torch.ones(8, 2)),
            **settings,
        )


def test_refuses_what_cannot_be_stepped() -> None:
    """A schedule that wants a metric; an optimizer that wants the loss again."""
    plateau = TrainingConfig(
        optimizer=sgd, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau
    )
    parameters = Parameters({"weight": nn.Parameter(torch.ones(2))})
    with pytest.raises(ConfigError, match="ReduceLROnPlateau steps with a metric"):
        plateau.make_scheduler(plateau.make_optimizer(parameters))
    with pytest.raises(ConfigError, match="LBFGS computes the loss several times"):
        TrainingConfig(optimizer=torch.optim.LBFGS).make_optimizer(parameters)


class EverySecond(torch.optim.SGD):
    """Adds up the gradients of two steps, by a `zero_grad()` of its own."""

    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        if self.calls != 2:
            super().zero_grad(set_to_none)


@pytest.mark.filterwarnings("ignore:this step runs as it is")
@pytest.mark.parametrize("compiles", [False, True])
def test_refuses_gradients_kept_at_some_steps(compiles: bool) -> None:
    """After the first step `zero_grad()` clears them, and after the second not."""
    batch = torch.ones(8, 2), torch.ones(8, 2)
    model, loss = nn.Linear(2, 2), nn.functional.mse_loss

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return EverySecond(parameters, lr=0.1, momentum=0.9)

    def train() -> None:
        if compiles:
            step = hocket.compile_step(model, loss, optimizer, example=batch)
            _ = step(batch), step(batch)
            return
        with hocket.Pipeline(model, loss, optimizer=optimizer, example=batch) as made:
            _ = made.step(batch), made.step(batch)

    with pytest.raises(ConfigError, match=r"EverySecond.zero_grad\(\) keeps gradients"):
        train()


def test_parameters_know_their_names() -> None:
    """A plain list for optimizers; with names for groups, and none that is frozen."""
    module = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    module[0].bias.requires_grad = False
    parameters = Parameters(dict(module.named_parameters()))
    assert [id(p) for p in parameters] == [id(p) for _, p in parameters.named()]
    assert [n for n, _ in parameters.named()] == ["0.weight", "1.weight", "1.bias"]
    named = torch.optim.AdamW(parameters.named())
    assert named.param_groups[0]["param_names"] == ["0.weight", "1.weight", "1.bias"]


def test_options_name_every_precision() -> None:
    """The names are written without torch, the enum beside its autocast."""
    assert get_args(PrecisionName) == tuple(p.value for p in Precision)


def small_pipeline(dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A pipeline of one device, and a batch for it."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    batch = (torch.ones(8, 2, dtype=dtype), torch.ones(8, 2, dtype=dtype))
    settings = {"optimizer": sgd, "example": batch, "num_microbatches": 2, **settings}
    return hocket.Pipeline(model, nn.functional.mse_loss, **settings), batch


@pytest.mark.timeout(60)
def test_averages_must_be_asked_for() -> None:
    """The error says how; the pipeline goes on."""
    pipeline, batch = small_pipeline()
    with pipeline:
        with pytest.raises(ConfigError, match=r"with ema_decay=0\.999"):
            pipeline.evaluate([batch], use_ema=True)
        with pytest.raises(ConfigError, match=r"with ema_decay=0\.999"):
            pipeline.state_dict(ema=True)
        result = pipeline.step(batch, batch)
    assert (result.num_samples, result.skipped) == (16, False)
    assert result.grad_norm > 0.0


@pytest.mark.timeout(60)
def test_autocast_wants_weights_in_float32() -> None:
    """Short weights are the model's own affair, without a loss scale."""
    with pytest.raises(ModelError, match=r"0\.weight is torch\.bfloat16"):
        small_pipeline(torch.bfloat16, precision="float16")
