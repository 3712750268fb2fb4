"""What is done for the ops of one stage, between its inputs and its outputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import ParamSpec, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.core.dataflow import Fact
from hocket.core.program import Program
from hocket.model.stages.splitter import Remainder
from hocket.run.device.device import Device, DeviceLane
from hocket.run.engine.lanes.action import Instruction, Playing
from hocket.run.engine.lanes.inputs import Input, NearInput, RegroupedInput, Values
from hocket.run.engine.lanes.op_times import OpTimer
from hocket.run.engine.lanes.ports import InputMaker
from hocket.run.engine.lanes.wiring import Wiring
from hocket.run.engine.programs.batch_loss import BatchLoss, Gather
from hocket.run.stage.runner import StageRunner

_P = ParamSpec("_P")
_T = TypeVar("_T")


class StageOps:
    """Makes the instructions of one stage's ops.

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
        is_last: whether it is evaluated, and no stage reads its output.
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
        self.is_last = evaluates and not program.targets[number]
        self.makes_loss = runner.loss.function is not None
        self.loss: BatchLoss | None = None
        self.gather: Gather | None = None
        self._sources = [
            source
            for source in _in_order(program, number)
            if source not in program.loss_inputs(number)
        ]
        self._inputs = [maker.input_of(source, number) for source in self._sources]
        self._outputs = maker.output(number, copies=not keeps)
        self._targets = program.gradient_targets[number]
        self._gradient_inputs = [
            maker.made(Fact.INPUT_GRAD, one, number) for one in self._targets
        ]
        if keeps and number in program.loss_stages:
            near = maker.loss_gradient(number)
            self._gradient_inputs = [NearInput(near, self.net, None)]
        self._wanted = [wiring.wanted(number, target) for target in self._targets]
        self._gradient_outputs = maker.gradient(number)
        self._received_from = _far(self._inputs)
        self._gradients_from = _far(self._gradient_inputs)
        self._reads_far = bool(self._received_from or self._gradients_from)
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

    def forward(self, *, splits: bool) -> Iterator[Instruction]:
        """Yield the instructions of F.

        Args:
            splits: whether I and W follow, and not B.
        """
        yield from _taking(self._inputs, f"output of {_listed(self._sources)}")
        if splits:
            yield Instruction("forward, to be split", self._forward_to_split)
        else:
            yield Instruction("forward", self._forward)
        if self._outputs.is_used:
            yield Instruction("put output", self._put)
        if not self._keeps:  # no backward will do so
            yield from _releasing(self._received_from, "output")

    def _forward_to_split(self, one: Playing) -> None:
        if self._reads_far:
            key = one.batch[self.net].step.place_of(one.index)
            self._received[key] = one.received
        self._forward(one, splits=True)

    def _forward(self, one: Playing, *, splits: bool = False) -> None:
        work, index = one.batch[self.net], one.index
        one.made = self._compute(
            one.timer,
            self._runner.forward,
            *work.step.place_of(index),
            work.microbatches[index],
            one.received,
            work.weight(index) if self.makes_loss else 1.0,
            splits=splits,
        )

    def evaluate(self) -> Iterator[Instruction]:
        """Yield the instructions of F without a backward.

        A stage whose output no stage reads leaves the model's output, and those of
        other nets that the loss reads.
        """
        yield from _taking(self._inputs, f"output of {_listed(self._sources)}")
        yield Instruction("evaluate", self._evaluate)
        if not self.is_last and self._outputs.is_used:
            yield Instruction("put output", self._put)
        yield from _releasing(self._received_from, "output")

    def _evaluate(self, one: Playing) -> None:
        microbatch = one.batch[self.net].microbatches[one.index]
        one.timer.start()
        values = self._runner.evaluate(microbatch, one.received)
        one.timer.end()
        if self.is_last:
            one.made = values, self._runner.others_of(microbatch, one.received)
        else:
            one.made = tuple(pytree.tree_leaves(values))

    def backward(self) -> Iterator[Instruction]:
        """Yield the instructions of B."""
        yield from self._taking_gradients()
        yield Instruction("backward", self._backward)
        yield from _releasing(self._gradients_from, "gradient")
        yield from self._putting_gradients()
        yield from _releasing(self._received_from, "output")

    def _backward(self, one: Playing) -> None:
        place = one.batch[self.net].step.place_of(one.index)
        backward = self._runner.backward
        one.made = self._compute(one.timer, backward, *place, one.received)

    def input_gradients(self) -> Iterator[Instruction]:
        """Yield the instructions of I; inputs that W does not read are released."""
        yield from self._taking_gradients()
        yield Instruction("input gradients", self._input_gradients)
        yield from self._putting_gradients()
        if self._reads_far:
            yield Instruction("release what W does not read", self._release_unread)

    def _input_gradients(self, one: Playing) -> None:
        place = one.batch[self.net].step.place_of(one.index)
        gradients = self._runner.input_gradients
        found = self._compute(one.timer, gradients, *place, one.received)
        one.made, remainder = found
        self._waiting[place] = remainder, []

    def _release_unread(self, one: Playing) -> None:
        key = one.batch[self.net].step.place_of(one.index)
        remainder, held = self._waiting[key]
        for inputs, tensors in (
            (self._gradients_from, one.received),
            (self._received_from, self._received.pop(key)),
        ):
            if inputs and remainder.holds(tensors):
                held += inputs
            else:
                for each in inputs:
                    each.release(one.batch, one.index)

    def weight_gradients(self) -> Iterator[Instruction]:
        """Yield the instructions of W."""
        yield Instruction("weight gradients", self._weight_gradients)

    def _weight_gradients(self, one: Playing) -> None:
        key = one.batch[self.net].step.place_of(one.index)
        remainder, held = self._waiting.pop(key)
        one.received, one.made = (), None  # of I, where both are one op
        one.timer.start()
        remainder.finish()
        one.timer.end()
        for each in held:
            each.release(one.batch, one.index)

    def _compute(
        self,
        timer: OpTimer,
        compute: Callable[_P, _T],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T:
        """Compute an op; holds what only one of several lanes may use."""
        device = self._device
        result: _T
        if device is None:
            result = timer.run(compute, *args, **kwargs)
            return result
        with self.lock:
            # The runner seeds the generator, which all lanes of a device share.
            draws = self._runner.module.random_layers
            lane = self._lanes[timer.lane]
            with device.fork_rng(lane, 0) if draws else nullcontext():
                result = timer.run(compute, *args, **kwargs)
            if self._runner.versions is not None:  # an update may drop old weights
                lane.keep_alive(self._runner.versions.in_place)
            return result

    def _put(self, one: Playing) -> None:
        self._outputs.put(one.batch, one.timer.lane, one.index, one.made)

    def _taking_gradients(self) -> Iterator[Instruction]:
        text = f"gradient of {_listed(self._targets)}"
        if len(self._gradient_inputs) < 2:
            yield from _taking(self._gradient_inputs, text)
        else:
            yield Instruction(f"take and add up {text}", self._take_sum_of_gradients)

    def _take_sum_of_gradients(self, one: Playing) -> None:
        """Take the gradients of the stage's outputs, added up over their readers."""
        sums: dict[int, Tensor] = {}
        for source, wanted in zip(self._gradient_inputs, self._wanted, strict=True):
            values = source.take(one.batch, one.index)
            places = range(len(values)) if wanted is None else wanted
            for place, value in zip(places, values, strict=True):
                sums[place] = sums[place] + value if place in sums else value
        one.received = tuple(x for _, x in sorted(sums.items(), key=itemgetter(0)))

    def _putting_gradients(self) -> Iterator[Instruction]:
        if self.loss is not None or self._gradient_outputs.is_used:
            yield Instruction("put gradient", self._put_gradients)

    def _put_gradients(self, one: Playing) -> None:
        values: Values = one.made
        if self.loss is not None:
            values = (*values, *self.loss.gradients_of_others(one.batch, one.index))
        self._gradient_outputs.put(one.batch, one.timer.lane, one.index, values)


def _in_order(program: Program, number: int) -> list[int]:
    """Return the sources of a stage: those of its net, ascending, then others."""
    net = program.stages[number].net
    sources = program.sources[number]
    own = sorted(source for source in sources if program.stages[source].net == net)
    return [*own, *(source for source in sources if source not in own)]


def _far(inputs: Sequence[Input]) -> list[Input]:
    """Return the inputs whose memory must be released."""
    return [one for one in inputs if not isinstance(one, NearInput | RegroupedInput)]


def _listed(stages: Sequence[int]) -> str:
    return ", ".join(map(str, stages)) or "the loss"


def _taking(inputs: Sequence[Input], text: str) -> Iterator[Instruction]:
    """Yield what takes a microbatch's values from all inputs, in their order."""

    def take_all(one: Playing) -> None:
        one.received = tuple(
            value for x in inputs for value in x.take(one.batch, one.index)
        )

    def take_only(one: Playing) -> None:
        one.received = first.take(one.batch, one.index)

    if inputs:
        first, *others = inputs
        yield Instruction(f"take {text}", take_all if others else take_only)


def _releasing(inputs: Sequence[Input], what: str) -> Iterator[Instruction]:
    """Yield what releases the memory of a microbatch's values."""

    def release(one: Playing) -> None:
        for x in inputs:
            x.release(one.batch, one.index)

    if inputs:
        yield Instruction(f"release {what}", release)
