"""Models whose values do not all go from one stage to the next, and how they run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hocket.model.stages.stage import StageModule


class Mix(nn.Module):
    """A linear layer on the product of its inputs, inside a tanh."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, *inputs: Tensor) -> Tensor:
        """From several x_BW to x_BW."""
        product = inputs[0]
        for other in inputs[1:]:
            product = product * other
        return torch.tanh(self.linear(product))


class Skipping(nn.Module):
    """Four layers; what the first makes is read by the last, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (Mix() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """From x_BW to x_BW."""
        skip = self.first(x)
        return self.last(self.third(self.second(skip)), skip)


class Branching(nn.Module):
    """Two branches read what the stem makes; the head joins them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.head = (Mix() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """From x_BW to x_BW."""
        stem = self.stem(x)
        left, right = self.left(stem), self.right(stem)
        return self.head(left, right)


def play(stages: Sequence[StageModule], leaves: Sequence[Tensor]) -> Tensor:
    """Forward and backward by messages along the flows alone.

    Each stage computes on tensors of its own. Gradients of an output are added up over
    all stages that it was sent to.

    Returns:
        The output, whose mean square was trained.
    """
    inbox: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    held: list[tuple[list[Tensor], tuple[Tensor, ...]]] = []
    output = torch.empty(0)
    for stage in stages:
        taken = [x for source in stage.received for x in inbox[source, stage.index]]
        inputs = [
            x.detach().requires_grad_(value.requires_grad)
            for x, value in zip(taken, stage.inputs, strict=True)
        ]
        made = stage(*inputs, *(leaves[i] for i in stage.batch_inputs))
        if stage.index == len(stages) - 1:
            output = made
            held.append((inputs, (made.square().mean(),)))
            continue
        by_name = dict(zip((x.name for x in stage.outputs), made, strict=True))
        for target, values in stage.sent.items():
            inbox[stage.index, target] = tuple(by_name[x.name] for x in values)
        held.append((inputs, made))
    _backward(stages, held)
    return output


def _backward(
    stages: Sequence[StageModule],
    held: Sequence[tuple[list[Tensor], tuple[Tensor, ...]]],
) -> None:
    grads: dict[tuple[int, str], Tensor] = {}  # by stage that made it or relays it
    for stage, (inputs, made) in reversed(list(zip(stages, held, strict=True))):
        if stage.outputs:
            wanted = [x.name for x in stage.outputs]
            torch.autograd.backward(made, [grads[stage.index, x] for x in wanted])
        else:
            made[0].backward()
        rest = iter(inputs)
        for source, values in stage.received.items():
            for value, x in zip(values, rest, strict=False):
                assert x.grad is not None
                before = grads.get((source, value.name))
                grads[source, value.name] = (
                    x.grad if before is None else before + x.grad
                )
