"""`hocket.compile_step`: a whole training step on one device, out of order.

step = compile_step(model, loss, optimizer, example=batch)
  │  captures the step, measures its regions, tries orders on one lane and on two,
  │  and keeps the fastest
step(batch)           plays it, for batches of the example's shapes;
                      other shapes get a graph of their own
step.synchronize()    before anything else reads the weights
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from math import nan
from threading import Lock
from time import perf_counter
from typing import Any, Self, TypeAlias

from torch import Tensor, nn

from hocket.core.schedule import Schedule
from hocket.core.timelines.timeline import Timeline
from hocket.errors import ConfigError, RunError
from hocket.model.trace.state import model_fault, refuse_no_values
from hocket.run.data.batch import apart, call_arguments, count_samples, on_device, whole
from hocket.run.data.loss import TOTAL, LossFunction, losses_of
from hocket.run.device.late import Late
from hocket.run.device.open import open_device
from hocket.run.engine.sync.step_result import StepResult, StepSeconds
from hocket.run.outoforder.capture.trace import buffers_in_place
from hocket.run.outoforder.capture.update import Optimizer
from hocket.run.outoforder.captured_orders import CapturedOrder, CapturedOrders
from hocket.run.outoforder.order.choose import OrderCandidate
from hocket.run.stage.loss_checks.trial import loss_part
from hocket.run.weights.gradients import GradientStatus
from hocket.run.weights.optimizer_check import OptimizerCheck
from hocket.run.weights.updater import clear_gradients

MakeOptimizer: TypeAlias = Callable[[Any], Optimizer]

_TIMEOUT_S = 600.0


def compile_step(
    model: nn.Module,
    loss: LossFunction,
    optimizer: MakeOptimizer,
    *,
    example: Any,
    memory_bytes: int | None = None,
    num_lanes: int = 2,
    across_steps: bool = False,
    sanitize: bool = False,
) -> CompiledStep:
    """Compile forward, backward and update of one device into one out-of-order step.

    Args:
        model: on the device to train on, in the mode to train in. It is trained in
            place.
        loss: `loss(output, targets)`; returns a scalar or a dict of named ones.
        optimizer: makes the optimizer, given the parameters of the model and the loss.
        example: a batch, a pair `(inputs, targets)`; orders are measured on it, and
            nothing is trained.
        memory_bytes: the most that all tensors of the step may take, weights and
            states included; None for no limit.
        num_lanes: 2; or 1, for the serial order alone.
        across_steps: also try orders in which the weight gradients and updates of the
            last layers run in the next step, before its forward reads their weights.
            Weights are those of the steps so far only behind `synchronize`.
        sanitize: check all accesses of the lanes for races, and overwrite memory that
            is released. Slow.

    Raises:
        ConfigError: `optimizer` is no function that makes an optimizer, `num_lanes` is
            neither 1 nor 2, or the model has nothing to train, or is lazy or scripted.
        FitError: `memory_bytes` is less than the serial order needs; names that number.
        CaptureError: the model changes its weights or its batch in forward.
        ModelError: the loss returns neither a scalar nor a dict of scalars.

    Warns:
        EagerStepWarning: the step cannot be captured; it runs as it is.
    """
    if num_lanes not in (1, 2):
        raise ConfigError(f"num_lanes={num_lanes}: a step has one lane or two")
    if fault := model_fault(model):
        raise ConfigError(fault)
    refuse_no_values(model, "the model", "load them first")
    weight = next((p for p in model.parameters() if p.requires_grad), None)
    if weight is None:
        raise ConfigError(
            "the model has no parameters, or all are frozen (requires_grad=False): "
            "there is nothing to train"
        )
    model = ModelAndLoss(model, loss)
    made = _make_optimizer(optimizer, model)
    device = open_device(
        weight.device, num_lanes, timeout_s=_TIMEOUT_S, sanitize=sanitize
    )
    step = CompiledStep(
        CapturedOrders(
            model, loss, made, device, memory_bytes, across_steps=across_steps
        )
    )
    step.prepare(example)
    return step


class CompiledStep:
    """Trains a model, one step at a time. Made by `compile_step`.

    Args:
        orders: captures the model's steps; its device is closed with the step.

    Attributes:
        optimizer: the optimizer, for schedulers of learning rates and for checkpoints.
    """

    def __init__(self, orders: CapturedOrders) -> None:
        self.optimizer, self._device = orders.optimizer, orders.device
        self._model, self._loss = orders.model, orders.loss
        self._orders = orders
        self._num_steps = 0
        named = orders.model.named_parameters()
        known = {name.removeprefix("model."): p for name, p in named}
        self._check = OptimizerCheck(orders.optimizer, known)
        self._lock = Lock()
        self._first: CapturedOrder | None = None

    def prepare(self, example: Any) -> None:
        """Capture the step for batches of this form, and choose its order.

        Raises:
            FitError: `memory_bytes` is less than the serial order needs.
            CaptureError: the model changes its weights or its batch in forward.

        Warns:
            EagerStepWarning: the step cannot be captured; it runs as it is.
        """
        try:
            self._first = self._orders.for_batch(
                apart(on_device(whole(example), self._device.torch_device))
            )
        except BaseException:
            self.close()
            raise

    @property
    def is_captured(self) -> bool:
        """Whether the step on the example is captured; else it runs as it is."""
        return self._first is not None

    @property
    def predicted(self) -> Timeline:
        """The simulated timeline of a step on the example, with the bytes over time.

        Raises:
            RunError: the step was not captured.
        """
        return self._example().candidates[0].predicted

    @property
    def candidates(self) -> tuple[OrderCandidate, ...]:
        """The orders that were tried for the example; the first is the one played.

        Raises:
            RunError: the step was not captured.
        """
        return self._example().candidates

    @property
    def schedule(self) -> Schedule:
        """The order that is played for the example.

        Raises:
            RunError: the step was not captured.
        """
        return self._example().candidates[0].schedule

    def __call__(self, batch: Any) -> StepResult:
        """Train on one batch, and wait for its losses.

        Raises:
            DataError: the batch is no pair, or its tensors have different numbers of
                samples.
            FitError: a batch of another form needs more than `memory_bytes`.
            CaptureError: in another mode, the model changes its weights in forward.
            RunError: a lane failed.

        Warns:
            EagerStepWarning: a batch of another form cannot be captured.
        """
        begin_s, num_samples = perf_counter(), count_samples(batch)
        batch = whole(batch)
        with self._one_caller():
            compiled = self._orders.for_batch(batch)
            losses = self._submit(batch, compiled)
            values = {name: float(loss) for name, loss in losses.items()}
            seconds, step = perf_counter() - begin_s, self._num_steps - 1
        idle = 0.0
        if compiled is not None:
            idle = compiled.candidates[0].predicted.lane_bubble_fraction(0)
        times = StepSeconds(seconds, seconds * (1.0 - idle), perf_counter())
        return StepResult(
            step,
            num_samples,
            self._device.peak_bytes(),
            status_of_captured_step(step),
            Late(lambda: {"model": values}),
            Late(lambda: times),
        )

    def submit(self, batch: Any) -> Mapping[str, Tensor]:
        """Train on one batch, and do not wait for the device.

        Returns:
            The losses by name, to be read before the next step.

        Raises:
            RunError: a lane failed; where the host does not wait, `synchronize` says.
        """
        batch = whole(batch)
        with self._one_caller():
            return self._submit(batch, self._orders.for_batch(batch))

    def synchronize(self) -> None:
        """Wait until all steps are done: from then on, weights may be read.

        Raises:
            RunError: a lane failed.
        """
        with self._one_caller():
            self._orders.finish()
        self._device.synchronize(_TIMEOUT_S)

    def close(self) -> None:
        """End the lanes; again: do nothing.

        With `across_steps`, call `synchronize` first: updates may wait for a step.
        """
        self._device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish all steps if there was no error, and close it."""
        with closing(self):
            if kind is None:
                self.synchronize()

    @contextmanager
    def _one_caller(self) -> Iterator[None]:
        """Let threads, and a thread's streams, take turns: a step has its tensors once.

        The caller's stream waits for the last step, which another one may have issued,
        before a batch is copied into the tensors that this step reads.
        """
        with self._lock:
            self._device.join()
            yield

    def _submit(
        self, batch: Any, compiled: CapturedOrder | None
    ) -> Mapping[str, Tensor]:
        batch = on_device(batch, self._device.torch_device)
        self._check.refuse_added()
        self._num_steps += 1
        self._orders.play_next(compiled)
        # The first step is torch's own: it makes the states as the optimizer wants.
        if compiled is None or not self._orders.states.bind():
            return self._eager(batch)
        return compiled.run(batch)

    def _eager(self, batch: Any) -> dict[str, Tensor]:
        """Train one step as torch does; it also makes the optimizer's states."""
        inputs, targets = batch
        args, kwargs = call_arguments(inputs)
        with buffers_in_place(self._model):
            losses = losses_of(self._loss, self._model(*args, **kwargs), targets)
        losses[TOTAL].backward()
        with self._check.stepping():
            self.optimizer.step()
        clear_gradients(self.optimizer)
        Optimizer.zero_grad(self.optimizer)
        self._model.zero_grad()  # what the optimizer leaves out, too
        return {name: loss.detach() for name, loss in losses.items()}

    def _example(self) -> CapturedOrder:
        if self._first is None:
            raise RunError(
                "the step could not be captured, and runs as it is: there is no order "
                "of its parts; the warning of compile_step says why"
            )
        return self._first


class ModelAndLoss(nn.Module):
    """Calls a model, and holds its loss: what either has and reads counts.

    Args:
        model: the model.
        loss: the loss.
    """

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        part = loss_part(loss, [model])
        if part is not loss and [*part.parameters(), *part.buffers()]:
            self.part = part  # of a loss that is no module itself
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output."""
        return self.model(*args, **kwargs)


def _make_optimizer(optimizer: Any, model: nn.Module) -> Optimizer:
    """Make the optimizer.

    Raises:
        ConfigError: `optimizer` is no function, or makes no torch optimizer.
    """
    made = optimizer(model.parameters()) if callable(optimizer) else optimizer
    if not callable(optimizer) or not isinstance(made, Optimizer):
        raise ConfigError(
            "optimizer must be a function that makes a torch optimizer, given the "
            "parameters, as in `lambda p: torch.optim.AdamW(p, 3e-4)`; got "
            f"{type(made).__name__}"
        )
    return made


def status_of_captured_step(step: int) -> Late[GradientStatus]:
    """Return the status of a step whose gradients are freed one by one."""
    why = (
        f"the gradients of step {step} are gone: a compiled step frees each one when "
        "its weight is updated; compute their norm in an eager step"
    )
    return Late(lambda: GradientStatus(nan, unknown=why))
