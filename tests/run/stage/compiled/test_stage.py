"""A compiled stage leaves the gradients, losses and buffers of the stage as it is.

In float64, to the last bits: with dropout, BatchNorm, tied weights, several inputs and
outputs, accumulation, forwards that run once more, and microbatches of other sizes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hocket.model.capture.capture import capture
from hocket.model.stages.cut import cut
from hocket.run.data.batch import Microbatch
from hocket.run.stage.precision import Precision
from hocket.run.stage.runner import StageRunner
from tests.run.stage.compiled.compiling import CPU, compile_one, function_of
from tests.run.stage.split.test_runner import assert_close, parts_of, runner_of, short
from tests.run.support.comparison import difference
from tests.run.support.small_models import ZOO, classes

NUM = 3
TOLERANCE = 1e-12


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "recomputes"),
    [
        ("normed", False),
        ("tied-dropout", True),
        pytest.param("normed", True, marks=pytest.mark.long),
        pytest.param("dropout", False, marks=pytest.mark.long),
    ],
)
def test_three_microbatches_on_their_way(name: str, recomputes: bool) -> None:
    """Twice, so that gradients add up; the last one is smaller, and not compiled.

    One of the backwards is whole, and no W comes before all I have run.
    """
    parts = parts_of(name)
    assert parts[2].num_samples < parts[0].num_samples
    eager, compiled = runner_of(name), runner_of(name, recomputes=recomputes)
    compile_one([compiled.module], 0, ZOO[name].loss, parts[:1])
    for step in (0, 1):
        for m, part in enumerate(parts):
            eager.forward(step, m, part, (), 1 / NUM)
            compiled.forward(step, m, part, (), 1 / NUM, splits=m != 1)
        for m in range(NUM):
            eager.backward(step, m, ())
        left = [compiled.input_gradients(step, m, ())[1] for m in (2, 0)]
        compiled.backward(step, 1, ())
        for waiting in left:
            waiting.finish()

    assert_close(eager, compiled, TOLERANCE)
    reported = compiled.loss.values.read()
    for m, losses in eager.loss.values.read().items():
        assert reported[m] == pytest.approx(losses, rel=TOLERANCE)
    assert not compiled.live
    assert function_of(compiled).num_calls == 4 * (2 if recomputes else 1)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_under_autocast() -> None:
    """In bfloat16; what is fused is rounded less often than in eager mode."""
    part = short(parts_of("dropout")[0])
    eager, compiled = (
        runner_of("dropout", precision=Precision.BFLOAT16) for _ in range(2)
    )
    compile_one(
        [compiled.module], 0, ZOO["dropout"].loss, [part], precision=Precision.BFLOAT16
    )
    for runner in (eager, compiled):
        runner.forward(0, 0, part, (), 1.0, splits=runner is compiled)
    eager.backward(0, 0, ())
    _, left = compiled.input_gradients(0, 0, ())
    left.finish()

    assert_close(eager, compiled, tolerance=0.05)
    assert function_of(compiled).num_calls == 1
    assert all(p.dtype is torch.float32 for p in compiled.parameters.values())


class Forked(nn.Module):
    """Two values go on, one of them untouched, and one that wants no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """From x_BW to logits_BC."""
        skipped = torch.tanh(self.first(x))
        y = self.frozen(torch.tanh(self.second(skipped)))
        y = y * (y > 0)
        logits: Tensor = self.last(y + skipped)
        return logits


@pytest.mark.timeout(300)
@pytest.mark.parametrize("splits", [False, True])
def test_a_stage_between_others(splits: bool) -> None:
    """It receives two values, gives gradients back for both, and trains a part."""
    eager, compiled = in_three(), in_three()
    part, loss = parts_of("perceptron")[0], ZOO["perceptron"].loss
    for stage in range(3):
        compile_one([runner.module for runner in compiled], stage, loss, [part])

    for a, b in zip(
        run_through(eager, part, splits),
        run_through(compiled, part, splits),
        strict=True,
    ):
        assert difference(b, a) <= TOLERANCE
    for one, other in zip(eager, compiled, strict=True):
        assert_close(one, other, TOLERANCE)
        assert function_of(other).num_calls == 1


def in_three() -> list[StageRunner]:
    """The model above in three stages."""
    torch.manual_seed(5)
    part, loss = parts_of("perceptron")[0], ZOO["perceptron"].loss
    model = Forked().double().train()
    modules = cut(capture(model, part.leaves, capture="export"), (1, 2))
    return [
        StageRunner(i, module, loss if i == 2 else None, device=CPU, seed=0)
        for i, module in enumerate(modules)
    ]


def run_through(
    stages: list[StageRunner], part: Microbatch, splits: bool
) -> list[Tensor]:
    """All gradients that went from stage to stage."""
    values: tuple[Tensor, ...] = ()
    for runner in stages:
        values = runner.forward(0, 0, part, values, 1.0, splits=splits)
    found: list[Tensor] = []
    for runner in reversed(stages):
        if splits:
            values, left = runner.input_gradients(0, 0, values)
            left.finish()
        else:
            values = runner.backward(0, 0, values)
        found += values
    return found


@pytest.mark.timeout(300)
def test_evaluation_runs_the_stage_as_it_is() -> None:
    """Without dropout, and without a trace in the statistics of a BatchNorm."""
    part = parts_of("normed")[0]
    eager, compiled = runner_of("normed"), runner_of("normed")
    compile_one([compiled.module], 0, ZOO["normed"].loss, [part])
    before = [x.clone() for x in compiled.module.buffers()]
    for runner in (eager, compiled):
        runner.train(mode=False)
    with torch.no_grad():
        one, other = (x.evaluate(part, ()) for x in (eager, compiled))
    assert isinstance(one, Tensor)
    assert isinstance(other, Tensor)
    assert torch.equal(one, other)
    for x, y in zip(before, compiled.module.buffers(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.timeout(300)
def test_hooks_on_parameters_hear_of_whole_gradients() -> None:
    """Once for each microbatch, in W."""
    parts = parts_of("perceptron")[:2]
    compiled = runner_of("perceptron")
    compile_one([compiled.module], 0, ZOO["perceptron"].loss, parts[:1])
    parameter = compiled.parameters["0.up.weight"]
    heard: list[Tensor] = []
    parameter.register_hook(heard.append)
    for m, part in enumerate(parts):
        compiled.forward(0, m, part, (), 0.5, splits=True)
    left = [compiled.input_gradients(0, m, ())[1] for m in (0, 1)]
    assert not heard
    for waiting in left:
        waiting.finish()

    assert len(heard) == 2
    assert parameter.grad is not None
    assert torch.allclose(heard[0] + heard[1], parameter.grad, rtol=1e-14)


@pytest.mark.timeout(300)
def test_images_of_one_channel() -> None:
    """Dense, they may have any stride there; results of convolutions follow it."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(1, 4, 2, 2), nn.Flatten(), nn.Linear(16, 3))
    x, targets = torch.randn(4, 1, 4, 4), torch.tensor([0, 1, 2, 0])
    other = x.as_strided(x.shape, (16, 1, 4, 1))
    assert other.is_contiguous()
    (module,) = cut(capture(model.train(), (x,), capture="export"), ())
    compile_one([module], 0, classes, [Microbatch((x,), targets, 4)])
    runner = StageRunner(0, module, classes, device=CPU, seed=0)
    for m, values in enumerate((x, other)):
        runner.forward(0, m, Microbatch((values,), targets, 4), (), 1.0)
        runner.backward(0, m, ())

    assert function_of(runner).num_calls == 2
    losses = runner.loss.values.read()
    assert losses[0] == losses[1]
