"""The ops of one stage on one microbatch, between its inputs and its outputs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from hocket.core.program import Program
from hocket.run.comm.step_header import StepHeader
from hocket.run.data.step_batch import StepBatch
from hocket.run.device.stopwatch import Stopwatch
from hocket.run.engine.ports import FarInput, Input, InputMaker
from hocket.run.stage.runner import StageRunner
from hocket.run.stage.split.splitter import Remainder


@dataclass(frozen=True, slots=True)
class _Waiting:
    """What I leaves for W.

    Args:
        remainder: the gradients that W computes.
        held: the inputs whose memory W still reads.
    """

    remainder: Remainder
    held: tuple[FarInput, ...]


class StageOps:
    """Computes one stage's ops.

    Args:
        number: the stage.
        runner: its module.
        program: says which stages come before and behind it.
        maker: makes the ways in and out.
        evaluates: forwards keep nothing.

    Attributes:
        makes_loss: whether its forwards make the loss.
    """

    def __init__(
        self,
        number: int,
        runner: StageRunner,
        program: Program,
        maker: InputMaker,
        *,
        evaluates: bool,
    ) -> None:
        self._runner = runner
        keeps = program.stages[number].trainable and not evaluates
        self._keeps = keeps
        self._is_last = not program.targets[number]
        self.makes_loss = runner.loss is not None
        self._inputs = maker.outputs_of(program.sources[number], number)
        self._outputs = maker.output(number, copies=not keeps)
        self._gradient_inputs = maker.gradients_of(number)
        self._gradient_outputs = maker.gradient(number)
        self._received_from = _far(self._inputs)
        self._gradients_from = _far(self._gradient_inputs)
        self._lock: AbstractContextManager[object] = nullcontext()
        # Of microbatches whose backward is split: what their forward received, and what
        # I has left.
        self._received: dict[tuple[int, int], Sequence[Tensor]] = {}
        self._waiting: dict[tuple[int, int], _Waiting] = {}

    def share_between_lanes(self) -> None:
        """Let one lane at a time run the stage's module, where several have its ops."""
        self._lock = threading.RLock()

    def forward(
        self, work: StepBatch, index: int, watch: Stopwatch, i: int, *, splits: bool
    ) -> None:
        """Play F.

        Args:
            work: the batch.
            index: the microbatch's number in the schedule.
            watch: takes the op's time.
            i: the op's number in the lane.
            splits: whether I and W follow, and not B.
        """
        step = work.step
        received = _taken(self._inputs, step, index)
        if splits:
            self._received[step.number, index] = received
        with self._lock:
            watch.start(i)
            values = self._runner.forward(
                step.number,
                work.number(index),
                work.microbatches[index],
                received,
                work.share(index) * work.loss_scale,
                splits=splits,
            )
            watch.end(i)
        self._outputs.put(step, index, values)
        if not self._keeps:
            _release(self._received_from, step, index)  # no backward will do so

    def evaluate(self, work: StepBatch, index: int, watch: Stopwatch, i: int) -> object:
        """Play F without a backward.

        Returns:
            The model's output, from its last stage; None from others.
        """
        received = _taken(self._inputs, work.step, index)
        watch.start(i)
        values = self._runner.evaluate(work.microbatches[index], received)
        watch.end(i)
        if not self._is_last:
            self._outputs.put(work.step, index, values)
        _release(self._received_from, work.step, index)
        return values if self._is_last else None

    def backward(self, work: StepBatch, index: int, watch: Stopwatch, i: int) -> None:
        """Play B."""
        step = work.step
        grads = _taken(self._gradient_inputs, step, index)
        with self._lock:
            watch.start(i)
            values = self._runner.backward(step.number, work.number(index), grads)
            watch.end(i)
        _release(self._gradients_from, step, index)
        self._gradient_outputs.put(step, index, values)
        _release(self._received_from, step, index)

    def input_gradients(
        self, work: StepBatch, index: int, watch: Stopwatch, i: int
    ) -> None:
        """Play I; inputs that W does not read are given back at once."""
        step = work.step
        grads = _taken(self._gradient_inputs, step, index)
        with self._lock:
            watch.start(i)
            values, remainder = self._runner.input_gradients(
                step.number, work.number(index), grads
            )
            watch.end(i)
        self._gradient_outputs.put(step, index, values)
        key = step.number, index
        held: list[FarInput] = []
        for inputs, tensors in (
            (self._gradients_from, grads),
            (self._received_from, self._received.pop(key)),
        ):
            if inputs and remainder.holds(tensors):
                held += inputs
            else:
                _release(inputs, step, index)
        self._waiting[key] = _Waiting(remainder, tuple(held))

    def weight_gradients(
        self, work: StepBatch, index: int, watch: Stopwatch, i: int
    ) -> None:
        """Play W."""
        waiting = self._waiting.pop((work.step.number, index))
        watch.start(i)
        waiting.remainder.finish()
        watch.end(i)
        _release(waiting.held, work.step, index)


def _far(inputs: Sequence[Input]) -> list[FarInput]:
    """Return the inputs whose memory must be given back."""
    return [one for one in inputs if isinstance(one, FarInput)]


def _release(inputs: Sequence[FarInput], step: StepHeader, index: int) -> None:
    for one in inputs:
        one.release(step, index)


def _taken(inputs: Sequence[Input], step: StepHeader, index: int) -> Sequence[Tensor]:
    """Take a microbatch's values from all inputs, in their order."""
    if len(inputs) == 1:
        return inputs[0].take(step, index)
    return tuple(value for one in inputs for value in one.take(step, index))
