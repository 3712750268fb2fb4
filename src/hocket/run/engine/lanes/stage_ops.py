"""The ops of one stage on one microbatch, between its inputs and its outputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.core.program import Program
from hocket.model.stages.splitter import Remainder
from hocket.run.data.step_batch import NetBatches
from hocket.run.device.device import Device, DeviceLane
from hocket.run.engine.lanes.inputs import Input, NearInput, RegroupedInput, Values
from hocket.run.engine.lanes.op_times import OpTimer
from hocket.run.engine.lanes.ports import InputMaker
from hocket.run.engine.lanes.wiring import Wiring
from hocket.run.engine.programs.batch_loss import BatchLoss, Gather
from hocket.run.stage.runner import StageRunner

_P = ParamSpec("_P")
_T = TypeVar("_T")


class StageOps:
    """Computes one stage's ops.

    Args:
        number: the stage.
        runner: its module.
        program: says which stages come before and behind it.
        wiring: which values go along each flow.
        maker: makes the ways in and out.
        evaluates: forwards keep nothing.

    Attributes:
        number: the stage.
        net: the stage's net.
        loss: op L; None where the loss is part of F, or there is none.
        gather: op G, where the stage has one.
        makes_loss: whether its forwards make a loss.
        lock: guards the module and its weights, where several lanes have the stage's
            ops.
    """

    def __init__(
        self,
        number: int,
        runner: StageRunner,
        program: Program,
        wiring: Wiring,
        maker: InputMaker,
        *,
        evaluates: bool,
    ) -> None:
        self._runner = runner
        self.number = number
        self.net = program.stages[number].net
        keeps = program.stages[number].trainable and not evaluates
        self._keeps = keeps
        self._is_last = evaluates and not program.targets[number]
        self.makes_loss = runner.loss.function is not None
        self.loss: BatchLoss | None = None
        self.gather: Gather | None = None
        self._inputs = [
            maker.input_of(source, number)
            for source in _in_order(program, number)
            if source not in program.loss_inputs(number)
        ]
        self._outputs = maker.output(number, copies=not keeps)
        self._take_inputs = _taking(self._inputs)
        targets = program.gradient_targets[number]
        self._gradient_inputs = [maker.gradient_of(one, number) for one in targets]
        if keeps and number in program.loss_stages:
            near = maker.loss_gradient(number)
            self._gradient_inputs = [NearInput(near, self.net, None)]
        self._take_gradients = (
            _taking(self._gradient_inputs)
            if len(self._gradient_inputs) < 2
            else self._sum_of_gradients
        )
        self._wanted = [wiring.wanted(number, target) for target in targets]
        self._gradient_outputs = maker.gradient(number)
        self._received_from = _far(self._inputs)
        self._gradients_from = _far(self._gradient_inputs)
        self.lock: AbstractContextManager[object] = nullcontext()
        self._device: Device | None = None
        self._lanes: Mapping[int, DeviceLane] = {}
        # Of microbatches whose backward is split: what their forward received; what I
        # leaves for W, and the inputs whose memory W still reads.
        self._received: dict[tuple[int, int], Sequence[Tensor]] = {}
        self._waiting: dict[tuple[int, int], tuple[Remainder, list[Input]]] = {}

    def share_between_lanes(self, device: Device, numbers: Sequence[int]) -> None:
        """Let one lane at a time run the stage's module, where several have its ops.

        Args:
            device: has the lanes.
            numbers: its lanes' numbers in the schedule.
        """
        self.lock = threading.RLock()
        self._device = device
        self._lanes = dict(zip(numbers, device.lanes, strict=True))

    def timed_alone(self, timer: OpTimer) -> OpTimer:
        """Return an op's timer; it holds what only one of several lanes may use."""
        if self._device is None:
            return timer
        return replace(timer, run=partial(self._run_alone, timer))

    def _run_alone(
        self,
        timer: OpTimer,
        compute: Callable[_P, _T],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T:
        device = self._device
        assert device is not None
        with self.lock:
            # The runner seeds the generator, which all lanes of a device share.
            draws = self._runner.module.random_layers
            lane = self._lanes[timer.lane]
            with device.fork_rng(lane, 0) if draws else nullcontext():
                result: _T = timer.run(compute, *args, **kwargs)
            if self._runner.versions is not None:  # an update may drop old weights
                lane.keep_alive(self._runner.versions.in_place)
            return result

    def forward(
        self, index: int, timer: OpTimer, batch: NetBatches, *, splits: bool
    ) -> None:
        """Play F.

        Args:
            index: the microbatch's number in the schedule.
            timer: takes the op's time.
            batch: the batch of each net.
            splits: whether I and W follow, and not B.
        """
        work = batch[self.net]
        step = work.step
        received = self._take_inputs(batch, index)
        if splits:
            self._received[step.place_of(index)] = received
        values = timer.run(
            self._runner.forward,
            step.number,
            step.first + index,
            work.microbatches[index],
            received,
            work.weight(index) if self.makes_loss else 1.0,
            splits=splits,
        )
        self._outputs.put(batch, timer.lane, index, values)
        if not self._keeps:
            for one in self._received_from:  # no backward will do so
                one.release(batch, index)

    def evaluate(
        self, index: int, timer: OpTimer, batch: NetBatches
    ) -> tuple[object, Sequence[Any]] | None:
        """Play F without a backward.

        Returns:
            From a stage whose output no stage reads: the model's output, and those of
            other nets that the loss reads; None from others.
        """
        received = self._take_inputs(batch, index)
        microbatch = batch[self.net].microbatches[index]
        timer.start()
        values = self._runner.evaluate(microbatch, received)
        timer.end()
        others: Sequence[Any] = ()
        if self._is_last:
            others = self._runner.others_of(microbatch, received)
        else:
            sent = tuple(pytree.tree_leaves(values))
            self._outputs.put(batch, timer.lane, index, sent)
        for one in self._received_from:
            one.release(batch, index)
        return (values, others) if self._is_last else None

    def backward(self, index: int, timer: OpTimer, batch: NetBatches) -> None:
        """Play B."""
        step = batch[self.net].step
        grads = self._take_gradients(batch, index)
        values = timer.run(
            self._runner.backward, step.number, step.first + index, grads
        )
        for one in self._gradients_from:
            one.release(batch, index)
        self._put_gradients(batch, index, timer, values)
        for one in self._received_from:
            one.release(batch, index)

    def split_backward(self, index: int, timer: OpTimer, batch: NetBatches) -> None:
        """Play B of a microbatch whose backward is split in another step."""
        self.input_gradients(index, timer, batch)
        self.weight_gradients(index, timer, batch)

    def input_gradients(self, index: int, timer: OpTimer, batch: NetBatches) -> None:
        """Play I; inputs that W does not read are released at once."""
        step = batch[self.net].step
        grads = self._take_gradients(batch, index)
        values, remainder = timer.run(
            self._runner.input_gradients, step.number, step.first + index, grads
        )
        self._put_gradients(batch, index, timer, values)
        key = step.place_of(index)
        held: list[Input] = []
        for inputs, tensors in (
            (self._gradients_from, grads),
            (self._received_from, self._received.pop(key)),
        ):
            if inputs and remainder.holds(tensors):
                held += inputs
            else:
                for one in inputs:
                    one.release(batch, index)
        self._waiting[key] = remainder, held

    def weight_gradients(self, index: int, timer: OpTimer, batch: NetBatches) -> None:
        """Play W."""
        key = batch[self.net].step.place_of(index)
        remainder, held = self._waiting.pop(key)
        timer.start()
        remainder.finish()
        timer.end()
        for one in held:
            one.release(batch, index)

    def _sum_of_gradients(self, batch: NetBatches, index: int) -> Values:
        """Return the gradients of the stage's outputs, added up over their readers."""
        sums: dict[int, Tensor] = {}
        for one, wanted in zip(self._gradient_inputs, self._wanted, strict=True):
            values = one.take(batch, index)
            places = range(len(values)) if wanted is None else wanted
            for place, value in zip(places, values, strict=True):
                sums[place] = sums[place] + value if place in sums else value
        return tuple(value for _, value in sorted(sums.items(), key=itemgetter(0)))

    def _put_gradients(
        self, batch: NetBatches, index: int, timer: OpTimer, values: Values
    ) -> None:
        if self.loss is not None:
            values = (*values, *self.loss.gradients_of_others(batch, index))
        self._gradient_outputs.put(batch, timer.lane, index, values)


def _in_order(program: Program, number: int) -> list[int]:
    """Return the sources of a stage: those of its net, ascending, then others."""
    net = program.stages[number].net
    sources = program.sources[number]
    own = sorted(source for source in sources if program.stages[source].net == net)
    return [*own, *(source for source in sources if source not in own)]


def _far(inputs: Sequence[Input]) -> list[Input]:
    """Return the inputs whose memory must be released."""
    return [one for one in inputs if not isinstance(one, NearInput | RegroupedInput)]


def _taking(inputs: Sequence[Input]) -> Callable[[NetBatches, int], Values]:
    """Return what takes a microbatch's values from all inputs, in their order."""
    if not inputs:
        return lambda batch, index: ()
    if len(inputs) == 1:
        return inputs[0].take
    return lambda batch, index: tuple(
        value for one in inputs for value in one.take(batch, index)
    )
