"""Random numbers in forwards: the same whatever the cut, others in each microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hocket.model.capture.capture import Captured, capture
from hocket.model.stages.cut import cut
from hocket.run.data.batch import Microbatch, split_batch
from hocket.run.stage.runner import StageRunner
from tests.run.support.small_models import batches, make_model

CPU = torch.device("cpu")


class Noisy(nn.Module):
    """Adds noise, and drops some of it: two draws in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """From x_BW to x_BW."""
        x = self.linear(x)
        return nn.functional.dropout(x + torch.rand_like(x), 0.4)


def deep(how: Any) -> tuple[Captured, Tensor]:
    """Five layers that draw, and their input."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Noisy() for _ in range(5))).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    return capture(model, (x,), capture=how), x


def forward(
    captured: Captured,
    boundaries: Sequence[int],
    x: Tensor,
    *,
    net: str = "model",
    step: int = 0,
    recomputes: bool = False,
) -> tuple[Any, list[Tensor]]:
    """Forward and backward of one microbatch in such stages; output and gradients."""
    for parameter in captured.model.parameters():
        parameter.grad = None
    runners = [
        StageRunner(
            i, module.train(), None, device=CPU, seed=5, net=net, recomputes=recomputes
        )
        for i, module in enumerate(cut(captured, boundaries))
    ]
    runners[-1].loss.function = lambda out, _: out.square().mean()
    part = Microbatch((x,), None, len(x))
    values: tuple[Tensor, ...] = ()
    for runner in runners:
        values = runner.forward(step, 3, part, values, 1.0)
        torch.rand(7)  # whatever else is drawn between two forwards
    losses = runners[-1].loss.values.read()
    grads: tuple[Tensor, ...] = ()
    for runner in reversed(runners):
        grads = runner.backward(step, 3, grads)
    found = [p.grad for p in captured.model.parameters() if p.grad is not None]
    return losses, found


@pytest.mark.parametrize("how", ["sequential", "export"])
def test_masks_do_not_depend_on_the_cut(how: str) -> None:
    """Bit for bit in 1, 2, 3 and 4 stages, also when forwards run twice."""
    captured, x = deep(how)
    expected, grads = forward(captured, (), x)
    for boundaries in ((2,), (1, 3), (1, 2, 4)):
        for recomputes in (False, True):
            found, other = forward(captured, boundaries, x, recomputes=recomputes)
            assert found == expected
            assert all(map(torch.equal, other, grads))


def test_masks_differ_between_nets_and_steps() -> None:
    """Two nets of one model, and the next step, draw numbers of their own."""
    captured, x = deep("sequential")
    losses = [
        forward(captured, (2,), x, **more)[0]
        for more in ({}, {"net": "teacher"}, {"step": 1})
    ]
    assert len({str(loss) for loss in losses}) == 3


def test_attention_and_embeddings_draw_the_same_in_any_stage() -> None:
    """A transformer with dropout and tied weights, exported."""
    model = make_model("tied-dropout").train()
    (part,) = split_batch(batches("tied-dropout", 1, 4, 4)[0], 1)
    tokens, mask, flavour = part.leaves
    captured = capture(model, (), {"tokens": tokens, "mask": mask, "flavour": flavour})
    found = []
    last = len(captured.layers)
    for boundaries in ((), (last // 2,), tuple(range(1, last))):
        stages = cut(captured, boundaries)
        values: Any = ()
        for stage in stages:
            runner = StageRunner(stage.index, stage.train(), None, device=CPU, seed=1)
            with runner._around_forward(0, 0):
                values = stage(*values, *(part.leaves[i] for i in stage.batch_inputs))
        found.append(values["logits"])
    assert all(torch.equal(logits, found[0]) for logits in found)
