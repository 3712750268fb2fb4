"""The captured steps of one model: a graph, and its order, for each form of batches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import CaptureError, FitError
from hocket.run.data.batch import on_device
from hocket.run.data.loss import LossFunction
from hocket.run.device.device import Device
from hocket.run.outoforder.capture.captured_step import (
    CapturedStep,
    OptimizerStates,
    StepTensors,
    capture_variants,
    distinct_bytes,
    preserved,
)
from hocket.run.outoforder.capture.trace import PLAIN_VALUES, WeightChangeError
from hocket.run.outoforder.capture.update import Optimizer
from hocket.run.outoforder.order.choose import (
    ChosenOrder,
    OrderCandidate,
    choose_order,
    faster_kernels,
)
from hocket.run.outoforder.order.inductor import with_inductor

Form: TypeAlias = tuple[Any, ...]

_MOST_SETTINGS = 3  # values of an optimizer's options that get a graph each


class EagerStepWarning(UserWarning):
    """A step could not be captured, and runs as it is."""


@dataclass(frozen=True, slots=True)
class CapturedOrder:
    """The captured step for one form of batches, and its order."""

    step: CapturedStep
    tensors: StepTensors
    chosen: ChosenOrder

    @property
    def candidates(self) -> tuple[OrderCandidate, ...]:
        """The orders that were tried; the first is the one played."""
        return self.chosen.candidates

    def run(self, batch: Any) -> dict[str, Tensor]:
        """Run one step; return its losses by name."""
        found = self.chosen.replay.run(self.tensors.given(batch))
        return {name: found[value] for name, value in self.step.losses.items()}


class CapturedOrders:
    """Captures the step and chooses its order, once for each form of batches.

    Args:
        model: is trained in place.
        loss: `loss(output, targets)`.
        optimizer: has the model's parameters.
        device: has as many lanes as orders may use.
        memory_bytes: see `compile_step`.
        across_steps: see `compile_step`.
        inductor: see `compile_step`.

    Attributes:
        states: the optimizer's states.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        optimizer: Optimizer,
        device: Device,
        memory_bytes: int | None,
        *,
        across_steps: bool,
        inductor: bool,
    ) -> None:
        self._model, self._loss, self._optimizer = model, loss, optimizer
        self._device, self._memory_bytes = device, memory_bytes
        self._across_steps, self._inductor = across_steps, inductor
        self.states = OptimizerStates(optimizer, dict(model.named_parameters()))
        self._by_form: dict[Form, CapturedOrder | None] = {}
        self._last: CapturedOrder | None = None  # what the last step was

    def play_next(self, order: CapturedOrder | None) -> None:
        """Finish the last step if the next one is not of the same order.

        Args:
            order: the next step's; None: it runs as it is.
        """
        if order is not self._last:
            self.finish()
        self._last = order

    def finish(self) -> None:
        """Run the updates that the last step has left for the next one."""
        if self._last is not None:
            self._last.chosen.replay.finish()

    def for_batch(self, batch: Any) -> CapturedOrder | None:
        """Return the captured step for batches of this form; capture it if needed.

        Returns:
            None where the step runs as it is: it cannot be captured, or the optimizer's
            options have taken too many values.
        """
        form = _form_of_step(batch, self._model, self._optimizer)
        if form not in self._by_form:
            alike = [other for other in self._by_form if other[:-1] == form[:-1]]
            if len(alike) == _MOST_SETTINGS:
                warnings.warn(
                    f"the optimizer's settings took {_MOST_SETTINGS} other values "
                    f"before {form[-1]}: with new ones a step runs as it is, and not "
                    "out of order. Let schedulers change learning rates alone "
                    "(cycle_momentum=False)",
                    EagerStepWarning,
                    stacklevel=3,
                )
                return None
            self._by_form[form] = self._compile(batch)
        return self._by_form[form]

    def _compile(self, batch: Any) -> CapturedOrder | None:
        batch = on_device(batch, self._device.torch_device)
        try:
            steps = capture_variants(self._model, self._loss, self._optimizer, batch)
        except WeightChangeError:
            raise
        except CaptureError as error:
            warnings.warn(
                f"this step runs as it is, and not out of order: {error}",
                EagerStepWarning,
                stacklevel=4,
            )
            return None
        self.finish()
        best = self._fastest(self._fitting(steps, batch))
        compiled = self._with_inductor(best, batch) if self._inductor else []
        return self._fastest([best, *compiled])

    def _fitting(
        self, steps: Sequence[CapturedStep], batch: Any
    ) -> list[CapturedOrder]:
        """Choose the order with each of the kernels.

        Raises:
            FitError: none fits into memory; of those errors, that of the smallest need.
        """
        orders: list[CapturedOrder] = []
        errors: list[FitError] = []
        for step in steps:
            try:
                orders.append(self._ordered(step, batch))
            except FitError as error:
                errors.append(error)
        if not orders:
            raise min(errors, key=lambda error: error.needed_bytes)
        return orders

    def _with_inductor(self, best: CapturedOrder, batch: Any) -> list[CapturedOrder]:
        """Return the same step with compiled regions, if any is faster and all fits."""
        given = best.tensors.given(batch)
        with preserved([*best.tensors.state.values()]):
            step = with_inductor(best.step, given, self._device)
        if step is None:
            return []
        try:
            return [self._ordered(step, batch)]
        except FitError:
            return []

    def _fastest(self, orders: list[CapturedOrder]) -> CapturedOrder:
        """Return the fastest order, with the candidates of all."""
        if len(orders) == 1:
            return orders[0]
        with preserved([*orders[0].tensors.state.values()]):
            place = faster_kernels([one.chosen for one in orders], self._device)
        best = orders.pop(place)
        rest = [one for order in orders for one in order.candidates]
        candidates = *best.candidates, *sorted(rest, key=lambda one: one.measured_s)
        return replace(best, chosen=replace(best.chosen, candidates=candidates))

    def _ordered(self, step: CapturedStep, batch: Any) -> CapturedOrder:
        tensors = StepTensors(
            step,
            self._model,
            self._optimizer,
            self.states,
            in_place=self._device.has_graphs,
        )
        self.states.bind()
        given = tensors.given(batch)
        always = distinct_bytes([*given.values()])
        with preserved([*tensors.state.values()]):
            chosen = choose_order(
                step,
                given,
                self._device,
                always,
                self._memory_bytes,
                across_steps=self._across_steps,
            )
        return CapturedOrder(step, tensors, chosen)


def _form_of_step(batch: Any, model: nn.Module, optimizer: Optimizer) -> Form:
    """Return all that a graph is fixed for: another value of it needs another graph.

    These are the batch's shapes, strides, types and structure, the mode of each module,
    which parameters are trained, and the optimizer's options but for learning rates.
    """
    leaves, spec = pytree.tree_flatten(batch)
    of_batch = tuple(map(_form_of_leaf, leaves))
    modes = tuple(module.training for module in model.modules())
    trained = tuple(x.requires_grad for x in model.parameters())
    settings = tuple(
        repr({k: group[k] for k in sorted(optimizer.defaults) if k != "lr"})
        for group in optimizer.param_groups
    )
    return of_batch, spec, modes, trained, settings


def _form_of_leaf(leaf: Any) -> Form:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return (type(leaf), leaf) if isinstance(leaf, PLAIN_VALUES) else (type(leaf),)
