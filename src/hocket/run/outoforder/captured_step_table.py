"""The op table of a captured step on one device: `schedule="ooo-single"`.

    0F0    nothing
    0B0    captured step      CompiledStep, of the user's own model
    0U     nothing

The executor keeps its one stage, the whole model, for evaluation and checkpoints.

Both have the same weights and buffers. A step seeds the generator once, and equals the
eager step under that seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.core.op import Kind, Op
from hocket.errors import ConfigError
from hocket.model.capture.captured import Captured
from hocket.run.data.batch import Microbatch
from hocket.run.data.loss import LossFunction
from hocket.run.device.open import open_device
from hocket.run.engine.executor import Executor
from hocket.run.engine.lanes.action import Instruction, OpAction, Playing
from hocket.run.engine.lanes.player import OpTable
from hocket.run.outoforder.captured_orders import CapturedOrders
from hocket.run.outoforder.compile_step import (
    CompiledStep,
    ModelAndLoss,
    status_of_captured_step,
)
from hocket.run.stage.precision import Precision
from hocket.run.stage.seed import seed_generators, step_seed

_NUM_LANES: Final = 2
_TIMEOUT_S: Final = 600.0


class CapturedStepTable(OpTable):
    """Has B play a whole step as a captured one, on the weights of the only stage.

    Args:
        executor: has one stage, the whole model.
        captured: the model.
        example: the batch on which orders are measured; nothing is trained.
        memory_bytes: the most that the step's tensors may take; None for no limit.
        precision: the type that forwards compute in.

    Raises:
        ConfigError: no weight is trained.
        FitError: the memory is less than the serial order needs.
        CaptureError: the model changes its weights in forward.

    Warns:
        EagerStepWarning: the step cannot be captured; it runs as it is.
    """

    def __init__(
        self,
        executor: Executor,
        captured: Captured,
        example: Microbatch,
        memory_bytes: int | None,
        precision: Precision,
    ) -> None:
        (self._runner,) = executor.runners.values()
        (self._updater,) = executor.updaters.values()
        if self._updater.optimizer is None:
            raise ConfigError(
                "no parameter of the model wants a gradient (requires_grad): there is "
                "nothing to train"
            )
        device = executor.context.world.device
        self._sync, self.torch_device = executor.sync, device
        self._runner.loss.values.outcome = "the weights were updated from it"
        loss = self._runner.loss.function
        assert loss is not None
        whole = _WholeModel(captured, loss, device, precision)
        self._model = whole.model
        self._buffers = [*_shared_buffers(self._model, self._runner.module)]
        self._train()
        orders = CapturedOrders(
            whole,
            self._runner.loss.named,
            self._updater.optimizer,
            open_device(device, _NUM_LANES, timeout_s=_TIMEOUT_S),
            memory_bytes,
        )
        self.step = CompiledStep(orders)
        self.step.prepare((example.leaves, example.targets))

    def action(self, op: Op) -> OpAction:
        """See `OpTable.action`."""
        if op.kind is Kind.BACKWARD:
            return OpAction([Instruction("captured step", self._play)])
        return OpAction([Instruction("a part of it", _take_no_time)])

    def _play(self, one: Playing) -> None:
        """Play one step.

        Raises:
            NonFiniteError: the loss is not finite.
            RunError: a lane failed.
        """
        (work,) = one.batch.values()
        number, (batch,) = work.step.number, work.microbatches
        one.timer.start()
        seed_generators(self.torch_device, step_seed(self._runner.seed, number))
        self._train()
        losses = self.step.submit((batch.leaves, batch.targets))
        for home, name, buffer in self._buffers:
            if home[name] is not buffer:  # a forward has replaced it
                buffer.copy_(home[name].detach())
                home[name] = buffer
        one.timer.end()
        self._updater.advance()
        self._sync.take_status(status_of_captured_step(number))
        self._runner.loss.values.take(number, 0, losses)
        self._sync.after_losses(self._runner.number, work)

    def _train(self) -> None:
        """Set training mode, unless the model is in it: its parts may not be."""
        if not self._model.training:
            self._model.train()


def _take_no_time(one: Playing) -> None:
    one.timer.start()
    one.timer.end()


class _WholeModel(ModelAndLoss):
    """Calls the user's own model.

    Args:
        captured: the model.
        loss: the user's own loss.
        device: what it computes on.
        precision: the type that it computes in.
    """

    def __init__(
        self,
        captured: Captured,
        loss: LossFunction,
        device: torch.device,
        precision: Precision,
    ) -> None:
        super().__init__(captured.model.to(device), loss)
        self._spec = captured.example.spec
        self._device, self._precision = device, precision

    def forward(self, *leaves: Any) -> Any:
        """Return the model's output for the leaves of its arguments."""
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return self._precision.computing(self._device, self.model)(*args, **kwargs)


def _shared_buffers(
    model: nn.Module, stage: nn.Module
) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Give a model the buffers of its stage; yield where each one lies."""
    for path, buffer in stage.named_buffers():
        place, _, name = path.rpartition(".")
        home = model.get_submodule(place)._buffers
        home[name] = buffer
        yield home, name, buffer
