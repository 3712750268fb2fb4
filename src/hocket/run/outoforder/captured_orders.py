"""The captured steps of one model: a graph, and its order, for each form of batches.

Asks, once per step, what captured steps are fixed for.

form      the batch's shapes, modes, what is trained, options ─▶ a graph for each
changes   attributes, hooks, functions, numbers, tensors      ─▶ no graph is right
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from hocket.errors import CaptureError, FitError
from hocket.model.guards.guards import Guards
from hocket.model.trace.per_sample import tensors_in
from hocket.run.data.batch import on_device
from hocket.run.data.loss import LossFunction
from hocket.run.device.device import Device
from hocket.run.outoforder.capture.captured_step import (
    CapturedStep,
    OptimizerStates,
    StepTensors,
    capture_variants,
    preserved,
)
from hocket.run.outoforder.capture.trace import PLAIN_VALUES, WeightChangeError
from hocket.run.outoforder.capture.update import Optimizer, hook_fault
from hocket.run.outoforder.order.choose import (
    OrderCandidate,
    choose_order,
    faster_kernels,
)
from hocket.run.outoforder.order.compare import StepComparison, StepDiffersError
from hocket.run.outoforder.play.step_replay import StepReplay
from hocket.run.stage.loss_checks.trial import restored_attributes
from hocket.run.stage.memory import num_bytes_held
from hocket.run.stage.split.layers.accumulate import has_hooks

log = logging.getLogger(__name__)

Form: TypeAlias = tuple[Any, ...]

# Of an optimizer's groups: what is read at each step, and what schedulers keep there.
_FOLLOWED: Final = {"params", "lr", "param_names", "initial_lr", "max_lr", "min_lr"}
_LEFT_OUT: Final = _FOLLOWED | {"base_momentum", "max_momentum"}

_MOST_SETTINGS = 3  # values of an optimizer's options that get a graph each
_MOST_PAUSE = 31  # steps in which the model's changes are not looked at
_MOST_SHARE = 0.05  # of all time, for graphs of a model that has changed often


class EagerStepWarning(UserWarning):
    """A step could not be captured, and runs as it is."""


@dataclass(frozen=True, slots=True)
class CapturedOrder:
    """The captured step for one form of batches, and its order.

    Args:
        step: the step.
        tensors: what it computes with.
        replay: runs its steps.
        candidates: the orders that were tried; the first is the one played.
    """

    step: CapturedStep
    tensors: StepTensors
    replay: StepReplay
    candidates: tuple[OrderCandidate, ...]

    def run(self, batch: Any) -> dict[str, Tensor]:
        """Run one step; return its losses by name."""
        found = self.replay.run(self.tensors.given(batch))
        return {name: found[value] for name, value in self.step.losses.items()}


@dataclass(eq=False)
class CapturedOrders:
    """Captures the step and chooses its order, once for each form of batches.

    Args:
        model: is trained in place.
        loss: `loss(output, targets)`.
        optimizer: has the model's parameters.
        device: has as many lanes as orders may use.
        memory_bytes: see `compile_step`.
        across_steps: see `compile_step`.

    Attributes:
        states: the optimizer's states.
        model, loss, optimizer, device: as given.
    """

    model: nn.Module
    loss: LossFunction
    optimizer: Optimizer
    device: Device
    memory_bytes: int | None
    across_steps: bool = False

    def __post_init__(self) -> None:
        self.states = OptimizerStates(
            self.optimizer, dict(self.model.named_parameters())
        )
        self._by_form: dict[Form, CapturedOrder | None] = {}
        self._last: CapturedOrder | None = None  # what the last step was
        self._forms = StepForms(self.model, self.optimizer)
        self._num_changes = 0
        self._begin_s, self._spent_s = perf_counter(), 0.0
        self._just_changed = self._has_warned = False
        self._pause = self._num_unasked = 0

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
            self._last.replay.finish()

    def for_batch(self, batch: Any) -> CapturedOrder | None:
        """Return the captured step for batches of this form; capture it if needed.

        Returns:
            None where the step runs as it is: it cannot be captured, what it is fixed
            for has just changed, or has changed too often, or the batch wants a
            gradient.
        """
        if self._is_changed() or any(x.requires_grad for x in tensors_in(batch)):
            return None  # a graph has no gradient of its batch
        form = self._forms.of(batch)
        if form not in self._by_form:
            alike = [other for other in self._by_form if other[:-1] == form[:-1]]
            if len(alike) == _MOST_SETTINGS:
                self._warn(
                    f"the optimizer's settings took {_MOST_SETTINGS} other values "
                    f"before {form[-1]}: with new ones a step runs as it is, and not "
                    "out of order. Let schedulers change learning rates alone "
                    "(cycle_momentum=False)"
                )
                return None
            if not self._may_capture():
                return None
            begin_s = perf_counter()
            self._by_form[form] = self._compile(batch)
            self._spent_s += perf_counter() - begin_s
        return self._by_form[form]

    def _is_changed(self) -> bool:
        """Return whether the model is another one than at the last step."""
        if self._by_form and not any(self._by_form.values()):
            return False  # all steps run as they are
        if self._num_unasked:
            self._num_unasked -= 1
            return True
        changes = self._forms.changes()
        if changes:
            self._by_form.clear()
            self._num_changes += 1
            log.info("this step runs as it is: %s", "; ".join(changes))
            if self._just_changed and not self._has_warned:
                self._has_warned = True
                self._warn(
                    f"steps run as they are, and not out of order, as long as each one "
                    f"has other values: {changes[0]}"
                )
            # Steps that run as they are need no comparison.
            self._pause = min(2 * self._pause + 1, _MOST_PAUSE)
            self._num_unasked = self._pause if self._just_changed else 0
        else:
            self._pause = 0
        self._just_changed = bool(changes)
        return self._just_changed

    def _may_capture(self) -> bool:
        """Return whether new captures take a small part of the time, or are few."""
        since_s = perf_counter() - self._begin_s
        is_cheap = self._spent_s < _MOST_SHARE * since_s
        return self._num_changes < _MOST_SETTINGS or is_cheap

    def _warn(self, text: str) -> None:
        warnings.warn(text, EagerStepWarning, stacklevel=5)

    def _compile(self, batch: Any) -> CapturedOrder | None:
        batch = on_device(batch, self.device.torch_device)
        try:
            with restored_attributes(self.loss):
                return self._captured(batch)
        except WeightChangeError:
            raise
        except CaptureError as error:
            self._warn(f"this step runs as it is, and not out of order: {error}")
            return None

    def _captured(self, batch: Any) -> CapturedOrder:
        steps = capture_variants(self.model, self.loss, self.optimizer, batch)
        if lost := self._forms.changes():
            raise CaptureError(f"{lost[0]} when it has run")
        self.finish()
        return self._fastest(self._right(steps, batch))

    def _right(self, steps: list[CapturedStep], batch: Any) -> list[CapturedOrder]:
        """Choose the order with each of the kernels; drop what is not the eager step.

        Raises:
            FitError: none fits into memory; of those errors, that of the smallest need.
            StepDiffersError: the first one computes something else, and so do others.
        """
        orders: list[CapturedOrder] = []
        too_large: list[FitError] = []
        others: list[StepDiffersError] = []
        for step in steps:
            try:
                orders.append(self._ordered(step, batch))
            except FitError as error:
                too_large.append(error)
            except StepDiffersError as error:
                others.append(error)
        if not orders:
            if too_large:
                raise min(too_large, key=lambda error: error.needed_bytes)
            raise others[0]
        for other in others:
            log.warning("some kernels are not used: %s", other)
        return orders

    def _fastest(self, orders: list[CapturedOrder]) -> CapturedOrder:
        """Return the fastest order, with the candidates of all."""
        if len(orders) == 1:
            return orders[0]
        with preserved([*orders[0].tensors.state.values()]):
            place = faster_kernels([one.replay for one in orders], self.device)
        best = orders.pop(place)
        rest = [one for order in orders for one in order.candidates]
        candidates = *best.candidates, *sorted(rest, key=lambda one: one.measured_s)
        return replace(best, candidates=candidates)

    def _ordered(self, step: CapturedStep, batch: Any) -> CapturedOrder:
        tensors = StepTensors(
            step,
            self.model,
            self.optimizer,
            self.states,
            in_place=self.device.has_graphs,
        )
        self.states.bind()
        given = tensors.given(batch)
        always = num_bytes_held(given.values())
        with preserved([*tensors.state.values()]):
            replay, candidates = choose_order(
                step,
                given,
                self.device,
                always,
                self.memory_bytes,
                across_steps=self.across_steps,
            )
        own = self.model, self.loss, self.optimizer, self.device
        StepComparison(*own, step, tensors, replay).check(batch)
        return CapturedOrder(step, tensors, replay, candidates)


class StepForms:
    """What the captured steps of a model are fixed for.

    Args:
        model: the model.
        optimizer: the optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._guards = Guards(model)
        self._num_hooks, self._is_hooked = -1, False
        self._read()

    def of(self, batch: Any) -> Form:
        """Return what has a graph for each of its values.

        These are the batch's shapes, strides, types and structure, the mode of each
        module, what is trained and autocast; and at last the optimizer's options but
        for learning rates.
        """
        leaves, spec = pytree.tree_flatten(batch)
        kind = self._tensors[0].device.type
        fixed = (
            tuple([module.training for module in self._modules]),
            tuple([x.requires_grad for x in self._tensors]),
            self._has_hooks(),
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        )
        groups = self._optimizer.param_groups
        settings = [
            repr({k: group[k] for k in sorted(group.keys() - _LEFT_OUT)})
            for group in groups
        ]
        lists = tuple([tuple(map(id, group["params"])) for group in groups])
        options = (*settings, lists, hook_fault(self._optimizer))
        return tuple(map(_form_of_leaf, leaves)), spec, fixed, options

    def _has_hooks(self) -> bool:
        """Return whether a weight has hooks; each new one gets a number."""
        if self._num_hooks != RemovableHandle.next_id:
            self._num_hooks = RemovableHandle.next_id
            self._is_hooked = any(map(has_hooks, self._tensors))
        return self._is_hooked

    def changes(self) -> list[str]:
        """Return what is otherwise than when this was last called, a line each."""
        # The form of a step has modes, and what is trained.
        known = self._guards.changes()
        changes = [x for x in known if not x.is_mode and x.kind != "trained"]
        found = [str(change) for change in changes]
        if self._places_now() != self._places:
            found.append("a weight or a buffer is another tensor")
        if len(found) > len(changes) or any(x.kind for x in changes):
            self._read()
        return found

    def _read(self) -> None:
        """Find the modules and tensors, and note where these are."""
        self._modules = [*self._model.modules()]
        homes = [home for x in self._modules for home in (x._parameters, x._buffers)]
        self._homes = [home for home in homes if home]
        self._places = self._places_now()

    def _places_now(self) -> list[tuple[int, int]]:
        every = [x for home in self._homes for x in home.values()]
        self._tensors = [x for x in every if x is not None]
        return [(id(x), x.data_ptr()) for x in self._tensors]


def _form_of_leaf(leaf: Any) -> Form:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return (type(leaf), leaf) if isinstance(leaf, PLAIN_VALUES) else (type(leaf),)
