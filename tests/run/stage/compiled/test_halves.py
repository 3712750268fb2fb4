"""What is kept back for W runs in W, and little is held for it in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.model.capture.capture import capture
from hocket.model.stages.cut import cut
from hocket.run.data.batch import Microbatch
from hocket.run.stage.runner import StageRunner
from tests.run.stage.compiled.compiling import CPU, compile_one, function_of
from tests.run.stage.split.test_runner import parts_of, runner_of
from tests.run.support.small_models import ZOO

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.hocket.add_product)
NUM, WIDTH = 64, 32
ITEM_BYTES = 8


class Net(nn.Module):
    """Two linear layers, and between them what keeps activations of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """From x_BW to x_BW."""
        x = self.embed(x)
        middle = F.gelu(self.norm(self.first(x)))
        found: Tensor = self.second(middle)
        return found


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.num += func.overloadpacket in PRODUCTS
        return func(*args, **(kwargs or {}))


def last_of_two(compiled: bool) -> tuple[StageRunner, Microbatch, tuple[Tensor, ...]]:
    """The stage behind the first layer, and its input."""
    torch.manual_seed(0)
    x = torch.randn(NUM, WIDTH, dtype=torch.float64)
    captured = capture(Net().double().train(), (x,), capture="export")
    modules = cut(captured, (1,))
    part = Microbatch((x,), torch.randn(NUM, WIDTH, dtype=torch.float64), NUM)
    if compiled:
        compile_one(modules, 1, F.mse_loss, [part])
    runner = StageRunner(1, modules[1], F.mse_loss, device=CPU, seed=0)
    with torch.no_grad():
        received = modules[0](x)
    return runner, part, received


@pytest.mark.timeout(300)
def test_the_weights_of_linear_layers_wait() -> None:
    """I has the products for the inputs, W those for the weights, and B has all."""
    runner, part, received = last_of_two(compiled=True)
    counts = []
    runner.forward(0, 0, part, received, 1.0, splits=True)
    with Products() as products:
        _, left = runner.input_gradients(0, 0, ())
        counts.append(products.num)
        large = [p for p in runner.parameters.values() if p.dim() > 1]
        assert all(p.grad is None for p in large)
        left.finish()
        counts.append(products.num - counts[0])
    runner.forward(0, 0, part, received, 1.0)
    with Products() as products:
        runner.backward(0, 0, ())
        counts.append(products.num)

    assert counts == [2, 2, 4]
    assert all(p.grad is not None for p in runner.parameters.values())
    assert function_of(runner).num_calls == 2


@pytest.mark.timeout(300)
def test_holds_inputs_and_output_gradients() -> None:
    """No more than layer by layer, and nothing when W has run."""
    held = []
    for compiled in (True, False):
        runner, part, received = last_of_two(compiled)
        runner.forward(0, 0, part, received, 1.0, splits=True)
        (dx,), left = runner.input_gradients(0, 0, ())
        held.append(left.num_bytes)
        assert not left.holds([dx])
        left.finish()
        assert left.num_bytes == 0
    two_inputs_and_two_gradients = 4 * NUM * WIDTH * ITEM_BYTES
    assert held[0] <= held[1] == two_inputs_and_two_gradients


@pytest.mark.timeout(300)
def test_without_inputs_that_want_gradients() -> None:
    """The chain of products is I's all the same, so that W is short."""
    part = parts_of("perceptron")[0]
    runner = runner_of("perceptron")
    compile_one([runner.module], 0, ZOO["perceptron"].loss, [part])
    runner.forward(0, 0, part, (), 1.0, splits=True)
    num_linear = sum(p.dim() == 2 for p in runner.parameters.values())
    with Products() as products:
        _, left = runner.input_gradients(0, 0, ())
        in_first = products.num
        left.finish()
    assert in_first == num_linear - 1
    assert products.num - in_first == num_linear
