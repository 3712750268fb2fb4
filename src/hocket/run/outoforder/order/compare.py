"""Compares a captured step with the eager one, once, before it is used.

    the model's own modules ─▶ losses, buffers, gradients    from the same weights,
    the captured step       ─▶ losses, buffers, gradients    under the same seed
                                                    │
    the optimizer's own step, of all weights  ◀─────┘ ─▶ weights, states
    the captured step                                 ─▶ weights, states

The updates are compared for the same gradients, since an optimizer may turn rounding
into large steps; and for a loss 1,000 times as large, where one that limits the norm of
all gradients does so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from hocket.core.op import Kind, Op
from hocket.errors import CaptureError
from hocket.run.data.batch import call_arguments
from hocket.run.data.loss import TOTAL, LossFunction, losses_of
from hocket.run.device.device import Device
from hocket.run.outoforder.capture.captured_step import (
    CapturedStep,
    StepTensors,
    preserved,
)
from hocket.run.outoforder.capture.code import state_name
from hocket.run.outoforder.capture.update import Optimizer
from hocket.run.outoforder.play.step_replay import StepReplay
from hocket.run.stage.compiled.trial import TOLERANCE, TOLERANCES
from hocket.run.stage.seed import seed_generators

_SCALES: Final = 1.0, 1e3  # of the loss
_LEAST_GRADIENT: Final = 1e-2  # of the largest one: below it all may be rounding
_NUM_ROUNDINGS: Final = 8  # of a value while it is updated
_TIMEOUT_S: Final = 600.0
_JOINT: Final = (
    "; does the optimizer look at several weights at once, as one that limits the norm "
    "of all gradients? Captured, each is updated as soon as its own gradient is there"
)

Named = dict[str, Tensor]


class StepDiffersError(CaptureError):
    """A captured step computes something else than the eager one."""


@dataclass(eq=False)
class StepComparison:
    """Compares one captured step with the eager one, on one batch.

    Args:
        model: the model; its modules run as they are.
        loss: `loss(output, targets)`.
        optimizer: the optimizer; it takes steps, which are undone.
        device: the captured step's.
        step: the captured step.
        tensors: what it computes with.
        replay: plays it.
    """

    model: nn.Module
    loss: LossFunction
    optimizer: Optimizer
    device: Device
    step: CapturedStep
    tensors: StepTensors
    replay: StepReplay

    def __post_init__(self) -> None:
        self._weights: Named = dict(self.model.named_parameters())
        known = {id(x) for x in self._weights.values()}
        listed = [x for group in self.optimizer.param_groups for x in group["params"]]
        for i, x in enumerate(x for x in listed if id(x) not in known):
            self._weights[f"{i} of the optimizer, outside of the model"] = x
        self._states = [
            x for update in self.step.updates.values() for x in update.states
        ]

    def check(self, batch: Any) -> None:
        """Compare both on a batch; nothing is trained.

        Raises:
            StepDiffersError: names the tensor that differs, with both values.
        """
        given = self.tensors.given(batch)
        start = given[self.step.regions.step.start.name]
        with self._undone():
            if self._missing():
                self._run(batch)
                self.optimizer.step()
            self._begin()
            try:
                for scale in _SCALES:
                    start.fill_(scale)
                    self._compare(batch, given, is_plain=scale == 1.0)
            finally:
                start.fill_(1.0)

    def _compare(self, batch: Any, given: Named, *, is_plain: bool) -> None:
        """Compare both with a loss of some scale.

        Args:
            batch: the batch.
            given: the captured step's tensors.
            is_plain: whether the loss is not scaled.
        """
        graph = self.step.regions.step.graph
        values = [node.meta.get("val") for node in graph.nodes]
        tolerance = _tolerance(x.dtype for x in values if isinstance(x, Tensor))
        before = self._buffers() | self._weights_and_states()
        gradients: Named = {}
        made = [self._made(lambda: self._watched(given, gradients))]
        if self.device.has_graphs:
            made.append(self._made(lambda: self._replayed(given)))
        with self._undone():
            expected = self._run(batch) | self._buffers()
            own = {n: x.grad for n, x in self._weights.items() if x.grad is not None}
        if is_plain:
            for one in made:
                _check_all(one, expected, before, tolerance)
            for name in sorted(gradients.keys() ^ own.keys()):
                who = "captured" if name in gradients else "eager"
                raise StepDiffersError(f"only the {who} step has a gradient of {name}")
            least = _LEAST_GRADIENT * max(map(_most, own.values()))
            _check_all(_gradients(gradients), _gradients(own), {}, tolerance, least)
        with self._undone():
            for name, weight in self._weights.items():
                weight.grad = gradients.get(name, own.get(name))
            self.optimizer.step()
            expected = self._weights_and_states()
        for one in made:
            _check_all(one, expected, before, why=_JOINT)

    def _made(self, run: Callable[[], Mapping[str, Tensor]]) -> Named:
        """Return what the captured step makes; it is undone."""
        with self._undone():
            seed_generators(self.device.torch_device, 0)
            losses = run()
            self.device.synchronize(_TIMEOUT_S)
            named = {f"loss {n}": losses[x] for n, x in self.step.losses.items()}
            state = self.tensors.state
            return _copies(
                named
                | self._buffers()
                | {f"weight {n}": x for n, x in self._weights.items()}
                | {_state(n, k): state[state_name(n, k)] for n, k in self._states}
            )

    def _watched(self, given: Named, gradients: Named) -> Mapping[str, Tensor]:
        """Run it op by op, and note its gradients; return its losses."""
        regions = self.step.regions

        def around(store: Named, op: Op, run: Callable[[], None]) -> None:
            if op.kind is Kind.UPDATE:
                for name in regions.weights[op.stage]:
                    made = store.get(regions.step.gradients[name].name)
                    if made is not None:
                        gradients[name] = made.clone()
            run()

        return self.replay.watch(given, around)

    def _replayed(self, given: Named) -> Mapping[str, Tensor]:
        """Run it as in training; return its losses."""
        losses = self.replay.run(given)
        self.replay.finish()
        return losses

    def _run(self, batch: Any) -> Named:
        """Run forward and backward as the plain loop does; return the losses."""
        seed_generators(self.device.torch_device, 0)
        inputs, targets = batch
        args, kwargs = call_arguments(inputs)
        losses = losses_of(self.loss, self.model(*args, **kwargs), targets)
        for weight in self._weights.values():
            weight.grad = None
        # The gradients of weights that only the loss has are not touched.
        wanted = [x for x in self._weights.values() if x.requires_grad]
        torch.autograd.backward(losses[TOTAL], inputs=wanted)
        return {f"loss {name}": x.detach() for name, x in losses.items()}

    def _buffers(self) -> Named:
        named = self.model.named_buffers()
        return _copies({f"buffer {name}": x for name, x in named})

    def _weights_and_states(self) -> Named:
        own = {_state(n, k): self._state_of(n)[k] for n, k in self._states}
        return _copies({f"weight {n}": x for n, x in self._weights.items()} | own)

    def _state_of(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state.get(self._weights[name], {})
        return found

    def _missing(self) -> list[str]:
        """Return the states of the captured step that the optimizer has not made."""
        return [
            _state(n, k)
            for n, k in self._states
            if not torch.is_tensor(self._state_of(n).get(k))
        ]

    def _begin(self) -> None:
        """Let the captured step begin with the optimizer's states."""
        for what in self._missing():
            raise StepDiffersError(f"only the captured step keeps a {what}")
        with torch.no_grad():
            for name, key in self._states:
                state = self.tensors.state[state_name(name, key)]
                state.copy_(self._state_of(name)[key])

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Restore all values, and the objects that hold them, when the block ends."""
        optimizer, modules = self.optimizer, [*self.model.modules()]
        own = dict(vars(optimizer))
        states = {x: dict(state) for x, state in optimizer.state.items()}
        groups = [dict(group) for group in optimizer.param_groups]
        buffers = [dict(module._buffers) for module in modules]
        grads = [x.grad for x in self._weights.values()]
        kept = [x for state in states.values() for x in state.values()]
        kept += [*self.model.buffers(), *self.tensors.state.values()]
        tensors = [*self._weights.values(), *(x for x in kept if torch.is_tensor(x))]
        with preserved([*{id(x): x for x in tensors}.values()]):
            try:
                yield
            finally:
                vars(optimizer).update(own)
                optimizer.state.clear()
                optimizer.state.update(states)
                for group, old in zip(optimizer.param_groups, groups, strict=True):
                    group.clear()
                    group.update(old)
                for module, before in zip(modules, buffers, strict=True):
                    module._buffers.update(before)
                for weight, grad in zip(self._weights.values(), grads, strict=True):
                    weight.grad = grad


def _state(weight: str, key: str) -> str:
    return f"state {key!r} of {weight}"


def _gradients(named: Mapping[str, Tensor]) -> Named:
    return {f"gradient of {name}": x for name, x in named.items()}


def _copies(tensors: Mapping[str, Tensor]) -> Named:
    return {name: x.detach().to("cpu", copy=True) for name, x in tensors.items()}


def _tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """Return how far the shortest of some types lets equal computations be apart."""
    floats = [x for x in dtypes if x.is_floating_point or x.is_complex]
    return max((TOLERANCES.get(x.to_real(), TOLERANCE) for x in floats), default=0.0)


def _check_all(
    actual: Named,
    expected: Named,
    before: Named,
    tolerance: float | None = None,
    least: float = 0.0,
    why: str = "",
) -> None:
    """Check that values are equal but for rounding.

    Args:
        actual: the captured step's, by what they are.
        expected: the eager step's.
        before: what they were; 0 where it is missing.
        tolerance: how far they may be apart, of how far they moved; that of their type
            if None.
        least: the least that this is a part of.
        why: what may be the reason.

    Raises:
        StepDiffersError: two are further apart.
    """
    for what, value in expected.items():
        limit = 0.0
        if value.is_floating_point() or value.is_complex():
            old = before.get(what, torch.zeros_like(value))
            share = _tolerance([value.dtype]) if tolerance is None else tolerance
            both = (_numbers(x) - _numbers(old) for x in (value, actual[what]))
            moved = max(map(_most, both))
            rounding = _NUM_ROUNDINGS * torch.finfo(value.dtype).eps * _most(old)
            limit = share * max(moved, least) + rounding
        off = (_numbers(actual[what]) - _numbers(value)).abs()
        if off.numel() and float(off.max()) > limit:
            place = int(off.argmax())
            a, b = (float(_numbers(x).flatten()[place]) for x in (actual[what], value))
            raise StepDiffersError(
                f"captured, it makes another {what} than the eager step: {a:.9g} "
                f"instead of {b:.9g}, where {limit:.3g} would be rounding{why}"
            )


def _numbers(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return torch.nan_to_num(real.detach().cpu().double())


def _most(tensor: Tensor) -> float:
    return float(_numbers(tensor).abs().max()) if tensor.numel() else 0.0
