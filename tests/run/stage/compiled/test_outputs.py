"""A compiled last stage of several outputs, and losses that use not always the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from hocket.errors import ModelError
from hocket.model.capture.capture import capture
from hocket.model.stages.cut import cut
from hocket.run.data.batch import Microbatch
from hocket.run.stage.compiled.capture import CannotCompileError, RequiredGraphs
from hocket.run.stage.compiled.trial import check_close
from hocket.run.stage.runner import StageRunner
from tests.run.stage.compiled.compiling import CPU, compile_one, function_of
from tests.run.stage.split.test_runner import grads_of
from tests.run.support.comparison import difference

WHEN_COMPILED = (0, 1)


class ThreeOutputs(nn.Module):
    """Of which a loss may use some."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.first, self.last = nn.Linear(6, 3), nn.Linear(6, 3)
        self.shift = nn.Parameter(torch.ones(1, 3))

    def forward(self, x: Tensor) -> list[Tensor]:
        """From x_BW to y_BC, a parameter as it is, and another y_BC."""
        x = torch.tanh(self.body(x))
        return [self.first(x), self.shift, self.last(x)]


class Loss:
    """Of some outputs; which ones may change while it is in use."""

    def __init__(self) -> None:
        self.uses: Sequence[int] = WHEN_COMPILED

    def __call__(self, outputs: list[Tensor], targets: Tensor) -> Tensor:
        """A scalar."""
        errors = [(outputs[i] - targets).square().mean() for i in self.uses]
        return torch.stack(errors).sum()


@pytest.mark.timeout(300)
def test_the_gradient_is_never_that_of_another_loss() -> None:
    """It is eager mode's, or an error: no output that came to be used is left out.

    Past bug: outputs that the loss had not used when it was compiled were cut off from
    the graph, so that a loss that began to use one trained without it, in silence.
    And a parameter that was an output was no leaf of autograd's graph any more.
    """
    loss, runners = Loss(), []
    part = Microbatch((torch.randn(4, 6),), torch.randn(4, 3), 4)
    model = ThreeOutputs().train()
    for is_compiled in (False, True):
        (module,) = cut(capture(model, part.leaves, capture="export"), ())
        if is_compiled:
            compile_one([module], 0, loss, [part])
        runners.append(StageRunner(0, module, loss, device=CPU, seed=0))
    eager, compiled = runners

    for splits in (False, True):
        for uses, reported in (
            ((0, 1, 2), "loss uses tensor 2 of the 3 .* and did not use when"),
            ((2,), "loss does not use tensor 0 of the 3 .* and did when"),
            ((1,), "loss does not use tensor 0 of the 3 .* and did when"),
        ):
            loss.uses = uses
            with pytest.raises(ModelError, match=f"{reported}.*compile=False"):
                run(compiled, part, splits=splits)
            assert all(grad is None for grad in grads_of(compiled).values())
    assert function_of(compiled).num_calls == 6

    loss.uses = WHEN_COMPILED
    for runner in runners:
        run(runner, part, splits=False)
    assert all(p.is_leaf and p.requires_grad for p in compiled.parameters.values())
    found = grads_of(compiled)
    for name, expected in grads_of(eager).items():
        actual = found[name]
        assert (actual is None) == (expected is None) == ("last" in name)
        if actual is not None and expected is not None:
            assert difference(actual, expected) < 1e-5


def run(runner: StageRunner, part: Microbatch, *, splits: bool) -> None:
    """Forward and backward of one microbatch."""
    runner.forward(0, 0, part, (), 1.0, splits=splits)
    if splits:
        runner.input_gradients(0, 0, ())[1].finish()
    else:
        runner.backward(0, 0, ())


class Repeated(nn.Module):
    """One tensor, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From x_BW to the same y_BC, the last without gradients."""
        y = self.linear(x)
        return y, y.contiguous(), y.detach()


def of_all_three(outputs: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Each otherwise."""
    first, second, third = outputs
    assert not third.requires_grad
    errors = (first - targets).square() + 3.0 * second.sin() + first * third
    return errors.mean()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("splits", [False, True])
def test_one_tensor_that_is_several_outputs(splits: bool) -> None:
    """Each has a gradient of its own, and they are added up.

    Past bug: autograd keeps one place in its graph for a tensor, so that the others
    seemed not to be used.
    """
    part = Microbatch((torch.randn(4, 6),), torch.randn(4, 3), 4)
    model, runners = Repeated().train(), []
    for is_compiled in (False, True):
        (module,) = cut(capture(model, part.leaves, capture="export"), ())
        if is_compiled:
            needs = RequiredGraphs(whole=not splits, split=splits)
            compile_one([module], 0, of_all_three, [part], needs=needs)
        runners.append(StageRunner(0, module, of_all_three, device=CPU, seed=0))
    for runner in runners:
        run(runner, part, splits=splits and runner is runners[1])

    eager, compiled = runners
    assert function_of(compiled).num_calls == 1
    found = grads_of(compiled)
    for name, expected in grads_of(eager).items():
        actual = found[name]
        assert actual is not None
        assert expected is not None
        assert difference(actual, expected) < 1e-5


def test_integers_must_be_equal_and_numbers_nearly_so() -> None:
    """An index that is off by one among large ones is no rounding."""
    indices = torch.tensor([1_000_000_000, 7])
    check_close(indices.clone(), indices)
    with pytest.raises(CannotCompileError, match="1 of 2 values differ"):
        check_close(indices + torch.tensor([1, 0]), indices)
    with pytest.raises(CannotCompileError, match="1 of 2 values differ"):
        check_close(torch.tensor([True, False]), torch.tensor([True, True]))
    numbers = indices.double()
    check_close(numbers + torch.tensor([1.0, 0.0]), numbers)
    with pytest.raises(CannotCompileError, match=r"off by 0\.5"):
        check_close(torch.tensor([1.5]), torch.tensor([1.0]))
