"""What I and W of each layer take and hold, beside whole stages at work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hocket.core.costs import StageCost
from hocket.model.capture.capture import Captured, capture
from hocket.model.profile.allocations import allocations
from hocket.model.profile.measure import profile
from hocket.model.profile.profile import Profile
from hocket.model.profile.work import stage_costs
from hocket.model.stages.cut import cut
from hocket.run.data.batch import Microbatch
from hocket.run.stage.runner import StageRunner
from hocket.run.stage.split.by_layers import ByLayers

CPU = torch.device("cpu")
WIDTH, NUM = 64, 128


class Block(nn.Module):
    """A pre-norm perceptron around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape whose last dimension is the width."""
        more: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + more


class Pixels(nn.Module):
    """Two convolutions with batch norm around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
        )

    def forward(self, x: Tensor) -> Tensor:
        """From images to images."""
        return nn.functional.relu(self.body(x) + x)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over samples."""
    return nn.functional.mse_loss(output, targets)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (
        lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))),
        lambda: torch.randn(NUM, WIDTH),
    ),
    "blocks": (
        lambda: nn.Sequential(*(Block() for _ in range(6))),
        lambda: torch.randn(8, 16, WIDTH),
    ),
    "resnet": (
        lambda: nn.Sequential(*(Pixels() for _ in range(6))),
        lambda: torch.randn(8, 8, 12, 12),
    ),
}


def measured(captured: Captured, x: Tensor, targets: Tensor) -> Profile:
    """A profile that ends with the loss."""
    return profile(
        captured,
        (x,),
        device=CPU,
        make_splitter=ByLayers,
        finish=lambda output: loss(output, targets),
        targets=targets,
    )


def costs_of(found: Profile, boundaries: Sequence[int], stages: Any) -> list[StageCost]:
    """Of each stage."""
    return list(stage_costs(found, boundaries, stages))


def test_held_bytes_by_hand() -> None:
    """A linear layer's input and output gradient; the batch is there anyway."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    x, targets = torch.randn(5, 4), torch.randn(5, 3)

    first, second = measured(capture(model, (x,)), x, targets).layers

    assert (first.held.weight_grad_held_bytes, first.held.held_input_bytes) == (
        5 * 8 * 4,
        0,
    )
    assert second.held.weight_grad_held_bytes == 5 * 3 * 4
    assert second.held.held_input_bytes == 5 * 8 * 4


def test_nothing_waits_where_all_weights_come_with_i() -> None:
    """Norms: their W has nothing to do, and holds nothing."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.LayerNorm(512) for _ in range(3)))
    x = torch.randn(64, 512)

    layers = measured(capture(model, (x,)), x, torch.randn(64, 512)).layers

    assert {
        x.held.weight_grad_held_bytes + x.held.held_input_bytes for x in layers
    } == {0}
    assert all(x.weight_grad_s < 0.3 * x.input_grad_s for x in layers)


def test_the_backward_divides_as_it_does_in_the_stage() -> None:
    """Three equal products: I makes one of them, and W another."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    x = torch.randn(512, 512)

    layers = measured(capture(model, (x,)), x, torch.randn(512, 512)).layers

    shares = [x.input_grad_s / (x.input_grad_s + x.weight_grad_s) for x in layers]
    assert 0.25 < median(shares[1:]) < 0.75
    assert shares[0] < 0.2  # the batch needs no gradient


@pytest.mark.parametrize("name", MODELS)
def test_stages_hold_what_their_layers_add_up_to(name: str) -> None:
    """From I to W, and at most during each of both, as the allocator counts."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, draw = MODELS[name]
    x = draw()
    targets = torch.randn_like(x)
    captured = capture(make(), (x,))
    boundaries = (2, 5)
    stages = cut(captured, boundaries)
    (_, cost, _) = costs_of(measured(captured, x, targets), boundaries, stages)

    with torch.no_grad():
        (received,) = stages[0].train()(x)
    dy = torch.randn_like(received)  # a message, as the input is
    runner = StageRunner(1, stages[1].train(), None, device=CPU, seed=0)
    part = Microbatch((x,), targets, x.shape[0])
    for parameter in stages[1].parameters():  # as for every microbatch but the first
        parameter.grad = torch.zeros_like(parameter)
    with allocations(CPU) as log:
        with log.span():
            (output,) = runner.forward(0, 0, part, (received,), 1.0, splits=True)
            del output
        with log.span():
            sent, left = runner.input_gradients(0, 0, (dy,))
        left_held_input, holds_dy = left.holds([received]), left.holds([dy])
        held = left.num_bytes - received.nbytes * left_held_input
        held_dy = dy.nbytes * holds_dy
        sent_bytes = sum(x.nbytes for x in sent)
        del sent
        with log.span():
            left.finish()

    assert cost.weight_grad_held_bytes == held
    assert cost.holds_input == left_held_input
    anchor = 4  # made with the first forward
    assert log.left[0] == cost.activation_bytes + anchor
    assert log.left[1] == held - held_dy + sent_bytes - cost.activation_bytes
    assert log.left[2] == held_dy - held
    # In I the gradient that came counts twice, as a message and as held; and those
    # between layers count until their layer's I has ended.
    work_bytes = cost.input_grad_work_bytes
    assert work_bytes - 2 * dy.nbytes <= log.peaks[1] <= work_bytes
    assert log.peaks[2] <= cost.weight_grad_work_bytes <= 1.05 * log.peaks[2]
