"""`Pipeline(schedule="ooo-single")` equals the eager step, under one seed per step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.errors import ConfigError, NonFiniteError, WaitError
from hocket.run.stage.seed import step_seed
from tests.run.outoforder.support.small_steps import TOLERANCE, difference

SEED: Final = 3
RATE: Final = 0.9
DECAY: Final = 0.5
NUM_STEPS: Final = 6


class Tagger(nn.Module):
    """Has positions made in forward, dropout, batch norm and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.positions = nn.Embedding(7, 8)
        self.drop = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, by class, then position."""
        at = self.positions(torch.arange(x.shape[1], device=x.device))
        y: Tensor = self.head(self.norm(self.drop(self.embedding(x) + at)))
        return y.transpose(1, 2)


def tagger() -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(1)
    return Tagger().double()


def batches() -> list[tuple[Tensor, Tensor]]:
    """Batches of 6 samples; the last has 4."""
    generator = torch.Generator().manual_seed(2)
    sizes = [6] * (NUM_STEPS - 1) + [4]
    drawn = [torch.randint(0, 11, (2, n, 7), generator=generator) for n in sizes]
    return [(x, y) for x, y in drawn]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With a rate at which six steps change much."""
    return torch.optim.AdamW(parameters, 1e-2)


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    """A learning rate that falls with each step."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, RATE)


def pipeline(model: nn.Module, **options: Any) -> hocket.Pipeline:
    """A pipeline that captures its steps, if nothing else is asked for."""
    settings: dict[str, Any] = {
        "optimizer": adamw,
        "example": batches()[0],
        "scheduler": decaying,
        "ema_decay": DECAY,
        "seed": SEED,
        "num_microbatches": 1,
        "schedule": "ooo-single",
    }
    loss = options.pop("loss", nn.functional.cross_entropy)
    return hocket.Pipeline(model, loss, **(settings | options))


def trained_eagerly() -> Iterator[tuple[float, nn.Module, dict[str, Tensor]]]:
    """Yield each step's loss, the model and its averaged weights."""
    model = tagger()
    optimizer = adamw(model.parameters())
    scheduler = decaying(optimizer)
    averages = {name: x.detach().clone() for name, x in model.named_parameters()}
    for step, (inputs, targets) in enumerate(batches()):
        torch.manual_seed(step_seed(SEED, step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        for name, x in model.named_parameters():
            averages[name].lerp_(x.detach(), 1.0 - DECAY)
        yield loss.item(), model, averages


def test_equals_eager_with_checkpoint_and_evaluation(tmp_path: Path) -> None:
    """Half of the steps, saved; loaded into a new pipeline; and the other half.

    The rate falls, weights are averaged, and the last batch is smaller. A pipeline of
    another schedule loads the checkpoint, too: it has the uncut model's names.
    """
    data, half = batches(), NUM_STEPS // 2
    losses: list[float] = []
    with pipeline(tagger()) as first:
        before = first.evaluate(data).loss
        losses += [result.loss for result in first.train(data[:half])]
        first.save(tmp_path)
        losses_after = [result.loss for result in first.train(data[half:])]
    with pipeline(tagger()) as second:
        assert second.evaluate(data).loss == pytest.approx(before, rel=TOLERANCE)
        next(second.train(data[:1]))  # its states are replaced by those that are loaded
        second.load(tmp_path)
        for result in second.train(data[half:]):
            losses.append(result.loss)
            assert not result.skipped
            with pytest.raises(WaitError, match="frees each one"):
                print(result.grad_norm)
        state, averaged = second.state_dict(), second.state_dict(ema=True)
        assert second.measured().step_s > 0.0
        assert second.plan.schedule_name == "ooo-single"
        hocket.check(second.predicted.schedule)
    expected = [*trained_eagerly()]
    assert losses[half:] == losses_after
    assert losses == pytest.approx([loss for loss, *_ in expected], rel=TOLERANCE)
    _, model, averages = expected[-1]
    trained = tagger()
    trained.load_state_dict(state)
    assert difference(trained, model) <= TOLERANCE
    for name, average in averages.items():
        torch.testing.assert_close(averaged[name], average, rtol=0.0, atol=TOLERANCE)
    with pipeline(tagger(), schedule="gpipe") as other:
        other.load(tmp_path)
        assert other.num_steps == half


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_norm": 1.0, "precision": "float16"}, "'gpipe'.*use 'bfloat16'"),
        ({"num_microbatches": 2}, "num_microbatches is 2: the batch is not cut; use 1"),
        ({"accumulate": 2, "compile": True}, "compile is True.*accumulate is 2"),
        (
            {"loss": hocket.WholeBatch(nn.functional.cross_entropy)},
            "without WholeBatch",
        ),
    ],
)
def test_refuses_what_needs_all_gradients(options: Any, words: str) -> None:
    """With every reason, and the way out."""
    with pytest.raises(ConfigError, match=words):
        pipeline(tagger(), **options)


def test_bfloat16_and_a_loss_that_is_not_finite() -> None:
    """The error says that the weights were updated, unlike that of other schedules."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    example = torch.randn(2, 4), torch.zeros(2, 1)
    options = {"example": example, "loss": nn.functional.mse_loss}
    with pipeline(model, **options, precision="bfloat16") as short:
        ops = [*short.train([example, example])]
        assert ops[1].loss < ops[0].loss
        bad = torch.full((2, 4), float("inf")), example[1]
        with pytest.raises(NonFiniteError, match="the weights were updated from it"):
            short.step(bad)
