"""Runs one stage: forward and backward of each microbatch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import compress, count
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from hocket.errors import ModelError
from hocket.model.stages.cut import StageModule
from hocket.model.stages.discard_saved_tensors import discard_saved_tensors
from hocket.model.stages.splitter import MakeSplitter, Remainder, Splitter
from hocket.model.trace.state import saved_tensors
from hocket.run.data.batch import Microbatch
from hocket.run.data.loss import LossFunction
from hocket.run.stage.backward import run_backward
from hocket.run.stage.compiled.function import (
    CompileWarning,
    is_compiled,
    make_splitter,
    uncompiled,
)
from hocket.run.stage.net_output import NetOutput, rebuilt
from hocket.run.stage.precision import Precision
from hocket.run.stage.recompute import ForwardInputs, Replay, Replayer
from hocket.run.stage.saved_forward import KeptOutputs, SavedForward, StageGradients
from hocket.run.stage.seed import layers_seeded
from hocket.run.stage.split.layers.call import Pending
from hocket.run.stage.stage_loss import StageLoss
from hocket.run.stage.stale_weight_check import check_stale_weights
from hocket.run.stage.versions import WeightVersions

_NOTHING: Final = nullcontext()  # can be entered again
_grad_of: Final = attrgetter("grad")
_requires_grad: Final = attrgetter("requires_grad")
_NOTHING_LEFT: Final[Remainder] = Pending(())


class StageRunner:
    """Runs one stage for any microbatch, in any order.

    Args:
        number: the stage's number in the program.
        module: the stage's module.
        loss: the loss function, for a net's last stage.
        device: the module's device.
        seed: the run's seed for random numbers.
        net: the name of the stage's net, for random numbers.
        first_microbatch: this replica's first, counted over all replicas, so that no
            two replicas draw the same numbers.
        precision: the type that forwards and losses compute in.
        recomputes: keep nothing of a forward but its input, and run it once more in
            the backward; to the same result, bit for bit.
        make_splitter: makes the splitter when a backward is split for the first time.
        checks_loss: whether the loss must be a mean over samples, for each microbatch
            is only a part of the batch.
        trainable: whether it has backwards.
        training: whether it runs in training mode, where nothing is evaluated.
        gradients: the inputs and outputs that want a gradient; those of the module
            when not given.
        others: the outputs of other nets that the loss reads behind the targets; or,
            in a stage without a loss, those before the batch's own tensors.
        saved_prefix: what comes before the model's names in the names of its state;
            None if the state is not saved.

    Attributes:
        loss: computes the losses, on a net's last stage.
        live: the state that forwards saved for their backwards, by step and microbatch.
        versions: the versions of the weights, if forwards read old ones.
        kept: gives outputs that need not be computed, if the stage has no backwards.
    """

    def __init__(
        self,
        number: int,
        module: StageModule,
        loss: LossFunction | None,
        *,
        device: torch.device,
        seed: int,
        net: str = "model",
        first_microbatch: int = 0,
        precision: Precision = Precision.FLOAT32,
        recomputes: bool = False,
        make_splitter: MakeSplitter = make_splitter,
        checks_loss: bool = False,
        trainable: bool = True,
        training: bool = True,
        gradients: StageGradients | None = None,
        others: Sequence[NetOutput] = (),
        saved_prefix: str | None = "",
    ) -> None:
        self.number = number
        self.saved_prefix = saved_prefix
        self.trainable = trainable
        self.module = module
        self.device = device
        self.seed = seed
        self.net = net
        self.first_microbatch = first_microbatch
        self._computes = partial(precision.computing, device)
        self._module = self._split_module = self._computes(module)
        self.loss = StageLoss(number, loss, device, precision, checks=checks_loss)
        self.live: dict[tuple[int, int], SavedForward | Replay] = {}
        self.versions: WeightVersions | None = None
        self.kept: KeptOutputs | None = None
        gradients = StageGradients.of(module) if gradients is None else gradients
        self._takes_grad = gradients.takes
        self._leaf_places = tuple(compress(count(), gradients.takes))
        self._gives_grad = gradients.gives
        self._trains = trainable and any(p.requires_grad for p in module.parameters())
        self._has_backward = self._trains or (trainable and any(self._takes_grad))
        self._others = others
        # Of the inputs, those of this net come first; without others, all are.
        self._num_own = len(module.inputs) if others else len(self._takes_grad)
        self._ends_net = loss is None and module.is_last
        self.training = training
        # Nothing has to be put in place around its forward, except for old weights.
        self._is_plain = trainable and not module.random_layers
        self._replayer = (
            Replayer(module, device) if recomputes and self._has_backward else None
        )
        self._make_splitter = make_splitter
        self._splitter: Splitter | None = None  # until a backward is split
        self._is_checked = False  # whether it may compute with old weights

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The stage's parameters, by the uncut model's names."""
        return dict(self.module.named_parameters())

    def saved_state(self, *, parameters: bool) -> dict[str, Tensor]:
        """Return the parameters, or persistent buffers, by the names of the state.

        Returns:
            The tensors by first name, with the prefix; none if they are not saved.
        """
        prefix = self.saved_prefix
        if prefix is None:
            return {}
        if parameters:
            return {f"{prefix}{name}": x for name, x in self.parameters.items()}
        kept = saved_tensors(self.module)
        named = self.module.named_buffers()
        return {f"{prefix}{name}": x for name, x in named if name in kept}

    def train(self, mode: bool) -> None:
        """Set train or eval mode; no effect if unchanged."""
        self.module.train(mode)

    def adopt(self, module: StageModule, *, is_checked: bool = False) -> None:
        """Run other code from the next forward on, with the very same weights.

        Args:
            module: the stage's module from then on.
            is_checked: whether it is known that it may compute with old weights.
        """
        if self.versions is not None:
            self.versions.take_out()
        if is_compiled(self.module):
            text = (
                f"stage {module.index} runs uncompiled from now on: its model, or the "
                "lengths of batches, are no longer those that it was compiled for"
            )
            warnings.warn(text, CompileWarning, stacklevel=2)
        self.module.adopt(module)
        self._is_plain = self.trainable and not module.random_layers
        self._split_module, self._splitter = self._module, None
        if self._replayer is not None:
            self._replayer = Replayer(self.module, self.device)
        if self.versions is not None:
            self.versions.find_places(self.module)
        self._is_checked = is_checked

    def forward(
        self,
        step: int,
        index: int,
        microbatch: Microbatch,
        received: Sequence[Tensor],
        weight: float,
        *,
        splits: bool = False,
    ) -> tuple[Tensor, ...]:
        """Run the forward and keep what the backward needs.

        Args:
            step: the step's number, for random numbers and errors.
            index: the microbatch's number within the step.
            microbatch: the microbatch's inputs and targets.
            received: the values from the stage before, detached.
            weight: the microbatch's share of the step, times the loss scale; 0 if none
                of its targets counts.
            splits: whether `input_gradients` will follow, and not `backward`.

        Returns:
            The outputs for the next stage, detached; nothing from the last stage.

        Raises:
            NonFiniteError: the loss is not a finite number, and is read at once.
            ModelError: the loss is no scalar, or does not depend on any weight;
                it is no mean over samples, or the stage cannot have old weights.
        """
        given, now = ForwardInputs(microbatch, tuple(received), weight), (step, index)
        if self.kept is not None:
            return self.kept.outputs(microbatch, lambda: self._sent(given, now))
        if not self._is_checked:
            self._check_stale_weights(received, microbatch)
        with self._around_forward(step, index):
            saved: SavedForward | Replay
            if self._replayer is None:
                saved, sent = self._run(*given, now, splits=splits)
            else:  # the second run splits
                saved = self._replayer.keep(given)
                _, sent = self._run(*given, now)
        if self._has_backward:
            self.live[now] = saved
        return sent

    def _sent(self, given: ForwardInputs, now: tuple[int, int]) -> tuple[Tensor, ...]:
        """Run a forward that keeps nothing; return its outputs."""
        with self._around_forward(*now):
            return self._run(*given, now)[1]

    def backward(
        self, step: int, index: int, grads: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Run the backward (B): accumulate weight gradients in `.grad`.

        Args:
            step: the microbatch's step.
            index: its number within the step.
            grads: the gradient of each output that wants one; none for the last stage.

        Returns:
            The gradients of the received inputs that want one.
        """
        if not self._has_backward:
            return ()
        live = self._saved(step, index, splits=False)
        if live.starts:
            run_backward(live.starts, live.given(grads))
        return live.found(map(_grad_of, live.leaves))

    def input_gradients(
        self, step: int, index: int, grads: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], Remainder]:
        """Run I, of a forward that was called with `splits`.

        Args:
            step: the microbatch's step.
            index: its number within the step.
            grads: the gradient of each output that wants one; none for the last stage.

        Returns:
            The gradients of the received inputs that want one; and W, whose `finish`
            accumulates the gradients of the weights.
        """
        if not self._has_backward:
            return (), _NOTHING_LEFT
        live = self._saved(step, index, splits=True)
        splitter = self._made_splitter()
        found, left = splitter.input_gradients(
            live.starts, live.given(grads), live.leaves
        )
        return live.found(found), left

    def evaluate(
        self, microbatch: Microbatch, received: Sequence[Tensor]
    ) -> tuple[Tensor, ...] | Any:
        """Run the forward alone; the last stage returns the model's own output."""
        if not self._is_checked:
            with contextlib.suppress(Exception):  # training raises it
                self._check_stale_weights(received, microbatch)
        return self._call(received, microbatch)

    def others_of(
        self, microbatch: Microbatch, received: Sequence[Tensor]
    ) -> list[Any]:
        """Return the outputs of other nets for a microbatch, which the loss reads.

        They are copies: what was received is released before the loss is computed.
        """
        forms = [replace(form, is_whole=False) for form in self.loss.others]
        read = received[len(self.module.inputs) :] if forms else ()
        return rebuilt([x.clone() for x in read], forms, microbatch)

    def _check_stale_weights(
        self, received: Sequence[Tensor], microbatch: Microbatch
    ) -> None:
        """Check, once, that the stage may compute with old weights.

        Compiled code may have no whole backward: the stage's own code is checked.
        """
        if self.versions is None or not self._has_backward:
            return
        with uncompiled(self.module):
            check_stale_weights(
                self.module,
                lambda: self._call(self._inputs(received), microbatch),
                device=self.device,
                delay=self.versions.delay,
            )
        self._is_checked = True

    def _inputs(self, received: Sequence[Tensor]) -> list[Tensor]:
        """Return the received values as leaves of a new graph."""
        inputs = list(received)
        for i in self._leaf_places:
            inputs[i] = inputs[i].detach().requires_grad_()
        return inputs

    def _saved(self, step: int, index: int, *, splits: bool) -> SavedForward:
        """Take what a forward has saved; run it once more if that is its inputs."""
        live = self.live.pop((step, index))
        if isinstance(live, SavedForward):
            return live
        assert self._replayer is not None
        with self._replayer.restored(live), self._around_forward(step, index):
            return self._run(*live.inputs, splits=splits)[0]

    def _around_forward(self, step: int, index: int) -> AbstractContextManager[object]:
        """Put the step's weights in place, and seed the layers that draw."""
        if self._is_plain:
            return _NOTHING if self.versions is None else self.versions.put(step)
        return self._forward_context(step, index)

    @contextmanager
    def _forward_context(self, step: int, index: int) -> Iterator[None]:
        with ExitStack() as stack:
            if not self.trainable:
                stack.enter_context(torch.no_grad())
            if self.versions is not None:
                stack.enter_context(self.versions.put(step))
            if self.module.random_layers:
                number = self.first_microbatch + index
                seeded = layers_seeded(
                    self.module, self.device, self.seed, step, self.net, number
                )
                stack.enter_context(seeded)
            yield

    def _made_splitter(self) -> Splitter:
        """Return the splitter, made when it is first needed."""
        if self._splitter is None:
            self._splitter = self._make_splitter(self.module)
            self._split_module = self._computes(self._splitter.module)
        return self._splitter

    def _run(
        self,
        microbatch: Microbatch,
        received: Sequence[Tensor],
        weight: float,
        now: tuple[int, int] | None = None,
        *,
        splits: bool = False,
    ) -> tuple[SavedForward, tuple[Tensor, ...]]:
        """Run the forward; return the state for its backward, and its outputs.

        The losses are recorded for a step and a microbatch, but not when recomputing.
        """
        inputs = self._inputs(received)
        # Not around the loss: what it has saved says what it divides by.
        keeps = now is None or self._replayer is None or self.module.runs_backward
        with discard_saved_tensors(keeps=keeps):
            out = self._call(inputs, microbatch, splits=splits)
        leaves = tuple(compress(inputs, self._takes_grad))
        if self.loss.function is None:
            return self._saved_outputs(leaves, out)
        outputs: tuple[Any, ...] = (out,)
        if self._others:
            outputs += (*rebuilt(inputs[self._num_own :], self._others, microbatch),)
        total = self.loss.total(outputs, microbatch, now, weight=weight)
        if self.trainable and not total.requires_grad:
            raise ModelError(
                "the loss does not depend on any weight: it was detached, or made from "
                "numbers (.item()), so nothing would be trained"
            )
        return SavedForward(leaves, (total,), (torch.full_like(total, weight),)), ()

    def _saved_outputs(
        self, leaves: tuple[Tensor, ...], out: Any
    ) -> tuple[SavedForward, tuple[Tensor, ...]]:
        """Return the outputs, detached, and their places in the graph."""
        sent = tuple(pytree.tree_leaves(out)) if self._ends_net else out
        giving = tuple(compress(sent, self._gives_grad))
        depends = tuple(map(_requires_grad, giving))
        edges = tuple(map(get_gradient_edge, compress(giving, depends)))
        sent = tuple(map(Tensor.detach, sent))
        return SavedForward(leaves, edges, depends=depends), sent

    def _given(self, leaf: Any) -> Any:
        """Return what the module gets of a batch's leaf: a float as a tensor.

        Operators on any device take it from the host, as they take a float.
        """
        if not isinstance(leaf, float) or self.module.whole:
            return leaf
        return torch.tensor(leaf, dtype=torch.float64)

    def _call(
        self, inputs: Sequence[Tensor], microbatch: Microbatch, *, splits: bool = False
    ) -> Any:
        """Call the module with the values from its own net, and with the batch's."""
        leaves: Sequence[Any] = microbatch.leaves
        if self._others and self.loss.function is None:
            leaves = (*inputs[self._num_own :], *leaves)
        received = inputs[: self._num_own]
        own = (self._given(leaves[i]) for i in self.module.batch_inputs)
        if not splits:
            return self._module(*received, *own)
        splitter = self._made_splitter()
        with splitter.on():
            return self._split_module(*received, *own)
