"""One stage at work: forward, backward, and what lives between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hocket.errors import ModelError, NonFiniteError
from hocket.model.cut import StageModule
from hocket.model.nothing_kept import nothing_kept
from hocket.run.batch import Microbatch
from hocket.run.loss import TOTAL, LossFunction, losses_of
from hocket.run.precision import Precision
from hocket.run.recompute import Given, Replay, Replayer
from hocket.run.seed import seed_generators, seed_of


@dataclass(slots=True)
class _Live:
    """What one microbatch leaves behind from its forward to its backward.

    Args:
        leaves: the received inputs that want a gradient.
        outputs: where the backward starts: the outputs' places in the graph, so that
            they themselves need not stay; None for one that turned out to need none.
        seeds: the gradient to start with, where it is known (the loss's weight).
    """

    leaves: tuple[Tensor, ...]
    outputs: tuple[GradientEdge | None, ...]
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
        precision: what forwards and losses compute in.
        recomputes: keep nothing of a forward but its input, and run it once more in
            the backward; to the same result, bit for bit.
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
        precision: Precision = Precision.FLOAT32,
        recomputes: bool = False,
    ) -> None:
        self.number = number
        self.module = module
        self.loss = loss
        self.device = device
        self.seed = seed
        self.first_microbatch = first_microbatch
        self._autocast = precision.autocast(device)
        self.losses: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.live: dict[tuple[int, int], _Live | Replay] = {}
        self._takes_grad = tuple(value.requires_grad for value in module.received)
        self._trains = any(p.requires_grad for p in module.parameters())
        self._gives_grad = tuple(value.requires_grad for value in module.sent)
        self._has_backward = self._trains or any(self._takes_grad)
        recomputes = recomputes and self._has_backward
        self._replayer = Replayer(module, device) if recomputes else None

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
            weight: this microbatch's share of the step, by samples, times the scale
                of the loss.

        Returns:
            What goes to the next stage, detached; nothing from the last stage.

        Raises:
            NonFiniteError: the loss is not a finite number.
            ModelError: the loss is no scalar, or does not depend on any weight.
        """
        if self.module.has_random:
            number = self.first_microbatch + index
            seed_generators(self.device, seed_of(self.seed, step, self.number, number))
        given = Given(microbatch, tuple(received), weight)
        if self._replayer is None:
            live, sent = self._run(step, index, given)
            if self._has_backward:
                self.live[step, index] = live
            return sent
        replay = self._replayer.keep(given)
        with nothing_kept():
            _, sent = self._run(step, index, given)
        self.live[step, index] = replay
        return sent

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
        if not self._has_backward:
            return ()
        live = self.live.pop((step, index))
        if isinstance(live, Replay):
            assert self._replayer is not None
            with self._replayer.restored(live):
                live, _ = self._run(step, index, live.given, again=True)
        pairs = [
            (output, grad)
            for output, grad in zip(live.outputs, live.seeds or grads, strict=True)
            if output is not None
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

    def _run(
        self, step: int, index: int, given: Given, *, again: bool = False
    ) -> tuple[_Live, tuple[Tensor, ...]]:
        """The forward: what its backward needs, and what goes to the next stage."""
        inputs = [
            value.detach().requires_grad_() if takes else value
            for value, takes in zip(given.received, self._takes_grad, strict=True)
        ]
        out = self._call(inputs, given.microbatch)
        leaves = tuple(
            value
            for value, takes in zip(inputs, self._takes_grad, strict=True)
            if takes
        )
        if self.loss is not None:
            total = self._losses(step, index, out, given.microbatch, again=again)
            if not total.requires_grad and (leaves or self._trains):
                raise ModelError(
                    "the loss does not depend on any weight: it was detached, or made "
                    "from numbers (.item()), so nothing would be trained"
                )
            seed = torch.full_like(total, given.weight)
            return _Live(leaves, (_edge(total),), (seed,)), ()
        outputs = tuple(
            _edge(value)
            for value, gives in zip(out, self._gives_grad, strict=True)
            if gives
        )
        sent = tuple(value.detach() for value in out)
        return _Live(leaves, outputs, None), sent

    def loss_of(self, output: Any, targets: Any) -> dict[str, Tensor]:
        """The named losses of what the model returned for one microbatch."""
        assert self.loss is not None
        with self._autocast:
            return losses_of(self.loss, output, targets)

    def _call(self, received: Sequence[Tensor], microbatch: Microbatch) -> Any:
        own = [microbatch.leaves[i] for i in self.module.batch_inputs]
        with self._autocast:
            return self.module(*received, *own)

    def _losses(
        self, step: int, index: int, out: Any, microbatch: Microbatch, *, again: bool
    ) -> Tensor:
        named = self.loss_of(out, microbatch.targets)
        total = named[TOTAL]
        if again:
            return total
        if not math.isfinite(total.item()):
            raise NonFiniteError(
                f"the loss is {total.item()} at step {step}, stage {self.number}, "
                f"microbatch {index}; no weights were updated from it"
            )
        self.losses[step, index] = {
            # Some losses are a scalar in the memory of what they are the mean of.
            name: value.detach().clone()
            for name, value in named.items()
        }
        return total


def _edge(output: Tensor) -> GradientEdge | None:
    return get_gradient_edge(output) if output.requires_grad else None
