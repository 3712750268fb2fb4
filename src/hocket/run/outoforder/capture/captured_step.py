"""One training step, captured for batches of one shape."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.core.op import Kind
from hocket.errors import CaptureError
from hocket.run.data.loss import LossFunction
from hocket.run.outoforder.capture.code import (
    StepCode,
    rate_name,
    state_name,
    step_code,
)
from hocket.run.outoforder.capture.lstm import has_lstm, is_fused
from hocket.run.outoforder.capture.regions import RegionKey, Regions, cut_into_regions
from hocket.run.outoforder.capture.trace import trace_step
from hocket.run.outoforder.capture.update import (
    Optimizer,
    UpdateGraph,
    UpdateTracer,
    rate_dtype,
    states_after_first_step,
)
from hocket.run.stage.compiled.trial import is_expanded

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A step's regions as functions, and what they compute with.

    Args:
        regions: the step as a program.
        updates: the optimizer's step of each unit that has weights.
        code: the functions.
        losses: the names of the values that are losses, by name of the loss.
        states: the optimizer's states of each weight; without memory before its first
            step.
        kernels: which kernels its regions call; see `OrderCandidate`.
    """

    regions: Regions
    updates: Mapping[int, UpdateGraph]
    code: StepCode
    losses: Mapping[str, str]
    states: Mapping[str, Mapping[str, Any]]
    kernels: str = "plain"

    @property
    def written(self) -> dict[RegionKey, frozenset[str]]:
        """The given tensors that each region changes in place."""
        step, written = self.regions.step, {}
        buffers = {step.buffers[name].name for name in step.new_buffers}
        made = {x for region in self.code.regions.values() for x in region.outputs}
        rates = {
            rate_name(i) for update in self.updates.values() for i in update.groups
        }
        for place, region in self.code.regions.items():
            given = frozenset(region.inputs) - made - rates
            written[place] = given if place.kind is Kind.UPDATE else given & buffers
        return written


def capture_variants(
    model: nn.Module, loss: LossFunction, optimizer: Optimizer, batch: Any
) -> list[CapturedStep]:
    """Capture a whole step of training, once for each choice of its kernels.

    Returns:
        The step; and the step with fused LSTMs, if the device has kernels for them
        and they can be captured; the log says why not.

    Raises:
        CaptureError: the model or the optimizer cannot be captured; it says why.
    """
    steps = [capture_step(model, loss, optimizer, batch)]
    if has_lstm(model):
        try:
            fused = capture_step(model, loss, optimizer, batch, fuses_lstm=True)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            log.warning("fused LSTMs are not tried, capturing them failed: %s", why)
            log.debug("capturing fused LSTMs failed", exc_info=True)
            return steps
        if is_fused(fused.regions.step.graph):
            steps.append(replace(fused, kernels="fused LSTM"))
    return steps


def capture_step(
    model: nn.Module,
    loss: LossFunction,
    optimizer: Optimizer,
    batch: Any,
    *,
    fuses_lstm: bool = False,
) -> CapturedStep:
    """Capture a whole step of training; nothing changes.

    Args:
        model: see `compile_step`.
        loss: see `compile_step`.
        optimizer: has the model's parameters.
        batch: a pair `(inputs, targets)`; its shapes and types count.
        fuses_lstm: see `RnnTracing`.

    Raises:
        CaptureError: the model or the optimizer cannot be captured; it says why.
    """
    graph = trace_step(model, loss, batch, fuses_lstm=fuses_lstm)
    regions = cut_into_regions(graph)
    own = dict(model.named_parameters())
    trained = {name: own[name] for name in regions.step.gradients}
    updated = {id(x) for group in optimizer.param_groups for x in group["params"]}
    for name, weight in trained.items():
        if id(weight) not in updated:
            raise CaptureError(
                f"{name} gets a gradient, and the optimizer has it not: switch it off "
                "(requires_grad), or give it to the optimizer"
            )
    states = states_after_first_step(optimizer, trained)
    trace = UpdateTracer(optimizer, states)
    updates = {
        unit: trace.update({name: trained[name] for name in names})
        for unit, names in enumerate(regions.weights)
        if names
    }
    losses = {name: node.name for name, node in regions.step.losses.items()}
    return CapturedStep(regions, updates, step_code(regions, updates), losses, states)


class OptimizerStates:
    """The optimizer's states, as tensors that stay the same in all steps.

    They are there before the optimizer has made its own, and become its own then.

    Args:
        optimizer: the optimizer.
        weights: all weights of the model, by name.
    """

    def __init__(
        self, optimizer: Optimizer, weights: Mapping[str, nn.Parameter]
    ) -> None:
        self.tensors: dict[str, Tensor] = {}  # by the name of the input
        self._optimizer, self._weights = optimizer, weights
        self._places: dict[str, tuple[str, str]] = {}

    def add(self, step: CapturedStep) -> None:
        """Make the states of a captured step that are not there yet."""
        for update in step.updates.values():
            for weight, key in update.states:
                name = state_name(weight, key)
                if name not in self.tensors:
                    self._places[name] = weight, key
                    like, own = step.states[weight][key], self._weights[weight]
                    made = torch.empty_strided(
                        like.shape, like.stride(), dtype=like.dtype, device=own.device
                    )
                    self.tensors[name] = made.zero_()

    def bind(self) -> bool:
        """Give the optimizer these tensors for its states, with its values.

        Returns:
            Whether the optimizer has all states: it has made a step of these weights,
            or was loaded.
        """
        state = self._optimizer.state
        owned = [
            (state.get(self._weights[weight], {}).get(key), self.tensors[name])
            for name, (weight, key) in self._places.items()
        ]
        if any(own is None for own, _ in owned):
            return False
        for (own, tensor), (weight, key) in zip(
            owned, self._places.values(), strict=True
        ):
            if own is not tensor:
                with torch.no_grad():
                    tensor.copy_(own)
                state[self._weights[weight]][key] = tensor
        return True


class StepTensors:
    """The tensors that a captured step computes with, by their names in the graph.

    Args:
        step: the step.
        model: has the weights and buffers.
        optimizer: has the learning rates.
        states: the optimizer's states.
        in_place: copy each batch into the tensors of the first one, which a captured
            graph reads.
    """

    def __init__(
        self,
        step: CapturedStep,
        model: nn.Module,
        optimizer: Optimizer,
        states: OptimizerStates,
        *,
        in_place: bool = False,
    ) -> None:
        self._step, self._optimizer = step, optimizer
        self._in_place = in_place
        graph = step.regions.step
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        states.add(step)
        names = [state_name(*x) for u in step.updates.values() for x in u.states]
        self.state: dict[str, Tensor] = {
            **{
                node.name: own[name].detach()
                for name, node in {**graph.parameters, **graph.buffers}.items()
            },
            **{name: states.tensors[name] for name in names},
        }
        device = next(model.parameters()).device
        start = graph.start.meta["val"]
        self._batch: dict[str, Tensor] = {}
        self._fixed = dict(step.code.constants) | {
            graph.start.name: torch.ones((), dtype=start.dtype, device=device)
        }
        groups = sorted({i for x in step.updates.values() for i in x.groups})
        self._rates = {
            i: torch.zeros((), dtype=rate_dtype(optimizer, i), device=device)
            for i in groups
        }

    def given(self, batch: Any) -> dict[str, Tensor]:
        """Return all tensors of a step on a batch, with the present rates."""
        for i, rate in self._rates.items():
            rate.fill_(float(self._optimizer.param_groups[i].get("lr", 0.0)))
        leaves = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
        names = [node.name for node in self._step.regions.step.batch]
        rates = {rate_name(i): rate for i, rate in self._rates.items()}
        of_batch = self._read(dict(zip(names, leaves, strict=True)))
        return {**self._fixed, **self.state, **rates, **of_batch}

    def _read(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that a step reads the batch from."""
        if not self._in_place:
            return batch
        for name, tensor in batch.items():
            if name in self._batch:
                self._batch[name].copy_(tensor, non_blocking=True)
            else:
                self._batch[name] = tensor.clone()
        return self._batch


@contextmanager
def preserved(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore tensors in place, and the random state, when the block ends."""
    tensors = [x for x in tensors if not is_expanded(x)]  # those cannot change
    kept = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    devices = {x.device for x in tensors if x.device.type != "cpu"}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, old in zip(tensors, kept, strict=True):
                    tensor.copy_(old)
