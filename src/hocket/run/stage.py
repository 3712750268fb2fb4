"""One stage at work: forward, backward, and what lives between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import ModelError, NonFiniteError
from hocket.model.cut import StageModule
from hocket.run.batch import Microbatch
from hocket.run.loss import TOTAL, LossFunction, losses_of
from hocket.run.seed import seed_generators, seed_of


@dataclass(slots=True)
class _Live:
    """What one microbatch leaves behind from its forward to its backward.

    Args:
        leaves: the received inputs that want a gradient.
        outputs: what the backward starts from.
        seeds: the gradient to start with, where it is known (the loss's weight).
    """

    leaves: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    seeds: tuple[Tensor, ...] | None


class StageRunner:
    """Runs one stage for any microbatch, in any order.

    Args:
        number: of the stage in the program.
        module: the cut part of the model.
        loss: given for the net's last stage.
        device: where the module lives.
        seed: of the run, for random numbers.
        first_microbatch: this replica's first, counted over all replicas, so that no
            two replicas draw the same numbers.
    """

    def __init__(
        self,
        number: int,
        module: StageModule,
        loss: LossFunction | None,
        *,
        device: torch.device,
        seed: int,
        first_microbatch: int = 0,
    ) -> None:
        self.number = number
        self.module = module
        self.loss = loss
        self.device = device
        self.seed = seed
        self.first_microbatch = first_microbatch
        self.losses: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.live: dict[tuple[int, int], _Live] = {}
        self._takes_grad = tuple(value.requires_grad for value in module.received)
        self._trains = any(p.requires_grad for p in module.parameters())
        self._gives_grad = tuple(value.requires_grad for value in module.sent)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """By the uncut model's names."""
        return dict(self.module.named_parameters())

    def train(self, mode: bool) -> None:
        """Switch dropout, batch norm and the like."""
        self.module.train(mode)

    def forward(
        self,
        step: int,
        index: int,
        microbatch: Microbatch,
        received: Sequence[Tensor],
        weight: float,
    ) -> tuple[Tensor, ...]:
        """Run the forward and keep what the backward needs.

        Args:
            step: for random numbers and errors.
            index: the microbatch's number within the step.
            microbatch: the batch inputs and targets.
            received: the values from the stage before, detached.
            weight: this microbatch's share of the batch, by samples.

        Returns:
            What goes to the next stage, detached; nothing from the last stage.

        Raises:
            NonFiniteError: the loss is not a finite number.
            ModelError: the loss is no scalar, or does not depend on any weight.
        """
        if self.module.has_random:
            number = self.first_microbatch + index
            seed_generators(self.device, seed_of(self.seed, step, self.number, number))
        inputs = [
            value.detach().requires_grad_() if takes else value
            for value, takes in zip(received, self._takes_grad, strict=True)
        ]
        out = self._call(inputs, microbatch)
        leaves = tuple(
            value
            for value, takes in zip(inputs, self._takes_grad, strict=True)
            if takes
        )
        if self.loss is not None:
            total = self._losses(step, index, out, microbatch)
            if not total.requires_grad and (leaves or self._trains):
                raise ModelError(
                    "the loss does not depend on any weight: it was detached, or made "
                    "from numbers (.item()), so nothing would be trained"
                )
            seed = torch.full_like(total, weight)
            self.live[step, index] = _Live(leaves, (total,), (seed,))
            return ()
        outputs = tuple(
            value for value, gives in zip(out, self._gives_grad, strict=True) if gives
        )
        self.live[step, index] = _Live(leaves, outputs, None)
        return tuple(value.detach() for value in out)

    def backward(
        self, step: int, index: int, grads: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Run the backward: gradients of the weights are added up in `.grad`.

        Args:
            step: the microbatch's step.
            index: its number within the step.
            grads: of each output that wants one; none for the last stage.

        Returns:
            The gradients of the received inputs that want one.
        """
        live = self.live.pop((step, index))
        pairs = [
            (output, grad)
            for output, grad in zip(live.outputs, live.seeds or grads, strict=True)
            if output.requires_grad
        ]
        if pairs:
            torch.autograd.backward([a for a, _ in pairs], [b for _, b in pairs])
        return tuple(
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for leaf in live.leaves
        )

    def evaluate(
        self, microbatch: Microbatch, received: Sequence[Tensor]
    ) -> tuple[Tensor, ...] | Any:
        """Run the forward alone; the last stage returns the model's own output."""
        return self._call(received, microbatch)

    def _call(self, received: Sequence[Tensor], microbatch: Microbatch) -> Any:
        own = [microbatch.leaves[i] for i in self.module.batch_inputs]
        return self.module(*received, *own)

    def _losses(
        self, step: int, index: int, out: Any, microbatch: Microbatch
    ) -> Tensor:
        assert self.loss is not None
        named = losses_of(self.loss, out, microbatch.targets)
        total = named[TOTAL]
        if not math.isfinite(total.item()):
            raise NonFiniteError(
                f"the loss is {total.item()} at step {step}, stage {self.number}, "
                f"microbatch {index}; no weights were updated from it"
            )
        self.losses[step, index] = {
            name: value.detach() for name, value in named.items()
        }
        return total
