"""Tries out whether a stage computes correctly with old weights.

A stage that reads old weights must be a function of its inputs, its weights and its
buffers, and its backward must not read the weights again: by then they are newer.

    forward ── backward                                   first gradients
    forward ── no number in the weights' places ── backward    the same?
       └ the same results as the first time?

A stage that is nothing but captured operators is such a function. Modules that are run
as they are may be anything, so these are tried out, once, on copies of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from hocket.errors import ModelError
from hocket.model.capture.attribute_writes import AttributeSnapshot, preserve_reached
from hocket.model.capture.no_checkpointing import CHECKPOINTING
from hocket.model.stages.stage import StageModule
from hocket.model.trace.are_close import are_close
from hocket.model.trace.per_sample import tensors_in
from hocket.model.trace.state import overwrite
from hocket.run.stage.recompute import changing_buffers
from hocket.run.stage.seed import preserve_generators, random_state, set_random_state
from hocket.run.stage.versions import ParameterSlots

Leaves = Mapping[str, Tensor]

_NUM_SAMPLED: Final = 4096  # elements of a gradient that are compared
_NUM_SHOWN: Final = 3  # names in an error


def check_stale_weights(
    module: StageModule, forward: Callable[[], Any], *, device: torch.device, delay: int
) -> None:
    """Refuse a stage whose results or gradients would be wrong with old weights.

    Gradients, random state, buffers and attributes are restored. For a while, weights
    and gradients are in memory twice.

    Args:
        module: the stage, with its weights in place.
        forward: runs the module on values such as it will receive; those that want a
            gradient are new leaves each time.
        device: the device that it runs on.
        delay: the age of its weights, in updates.

    Raises:
        ModelError: one of its modules keeps state between forwards, runs again in the
            backward, or finds weights otherwise than in their places.
    """
    objects = vars(module.training_code.objects).values()  # inner graphs, too
    if delay == 0 or not any(isinstance(x, nn.Module) for x in objects):
        return
    trial = _StaleWeightTrial(module, forward, device, delay)
    whole = nn.ModuleList([module, *module.whole])
    with preserve_reached(whole), preserve_generators(device):
        module.train()
        trial.run()


@dataclass(frozen=True, slots=True)
class _TrialResult:
    """The result of one forward and backward.

    Args:
        outputs: the forward's outputs.
        grads: a sample and the size of each trained weight's gradient; empty if it got
            none.
        again: the modules that the backward called.
    """

    outputs: list[Tensor]
    grads: dict[str, list[Tensor]]
    again: list[str]


@dataclass(eq=False)
class _StaleWeightTrial:
    """Runs one stage twice forward and backward, on copies of its weights."""

    module: StageModule
    forward: Callable[[], Any]
    device: torch.device
    delay: InitVar[int]

    def __post_init__(self, delay: int) -> None:
        """Note what is there before the two runs."""
        module = self.module
        self._random = random_state(self.device)
        self._where = (
            f"stage {module.index} reads weights that are {delay} "
            f"update{'s' if delay > 1 else ''} old"
        )
        named = module.named_parameters()
        self._trained = {name: p for name, p in named if p.requires_grad}
        self._places = ParameterSlots(module, self._trained)
        parts = list(module.modules())
        self._homes = [(part._buffers, dict(part._buffers)) for part in parts]
        self._buffers = [
            (home[key], home[key].detach().clone())
            for home, key in changing_buffers(module)
        ]

    def run(self) -> None:
        """Compare the two runs.

        Raises:
            ModelError: see `check_stale_weights`.
        """
        notes = AttributeSnapshot(self.module)
        with self._untouched():
            leaves = self._copies()
            first = self._backward(self._outputs(leaves), leaves, leaves)
            changed = notes.changed()
            leaves = self._copies()
            outputs = self._outputs(leaves)
            if not are_close(first.outputs, outputs):
                raise ModelError(self._keeps_state(changed))
            second = self._backward(outputs, leaves, self._nothing(), changed)
        wrong = [
            name
            for name, grad in first.grads.items()
            if not are_close(grad, second.grads[name])
        ]
        if wrong:
            raise ModelError(self._wrong(changed, second.again, wrong))

    def _outputs(self, leaves: Leaves) -> list[Tensor]:
        """Run a forward with these weights; restore buffers and random state first."""
        self._restore()
        with self._places.filled(leaves), torch.enable_grad():
            return tensors_in(self.forward())

    def _backward(
        self,
        outputs: Sequence[Tensor],
        leaves: Leaves,
        placed: Leaves,
        changed: Sequence[str] = (),
    ) -> _TrialResult:
        """Run a backward with other tensors in the weights' places."""
        set_random_state(self.device, self._random)
        starts = [x for x in outputs if x.requires_grad]
        again: list[str] = []
        names = {part: name for name, part in self.module.named_modules() if name}
        calls = register_module_forward_pre_hook(
            lambda part, _: again.append(names[part]) if part in names else None
        )
        try:
            if starts:
                with self._places.filled(placed):
                    torch.autograd.backward(starts, list(map(torch.randn_like, starts)))
        except Exception as error:
            if placed is leaves:
                raise
            raise ModelError(self._wrong(changed, again)) from error
        finally:
            calls.remove()
        self._restore()
        grads = {name: _sample(leaf.grad) for name, leaf in leaves.items()}
        return _TrialResult([x.detach() for x in outputs], grads, again)

    def _copies(self) -> dict[str, Tensor]:
        return {
            name: p.detach().clone().requires_grad_()
            for name, p in self._trained.items()
        }

    def _nothing(self) -> dict[str, Tensor]:
        """Return tensors that spoil any computation which reads them."""
        return {
            name: torch.full((), math.nan, dtype=p.dtype, device=p.device)
            .expand(p.shape)
            .requires_grad_()
            for name, p in self._trained.items()
        }

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Restore the weights' own gradients afterwards."""
        before = {name: p.grad for name, p in self._trained.items()}
        for p in self._trained.values():
            p.grad = None
        try:
            yield
            found = [name for name, p in self._trained.items() if p.grad is not None]
        finally:
            for name, p in self._trained.items():
                p.grad = before[name]
            self._restore()
        if found:
            raise ModelError(
                f"{self._where}, but some module of it finds {_some(found)} otherwise "
                "than as its own parameter, and so always the newest: let forward read "
                f"self.weight and the like. {_FLUSHES}"
            )

    def _restore(self) -> None:
        """Restore buffers and random state from before the first forward."""
        for home, buffers in self._homes:
            home.update(buffers)
        for buffer, value in self._buffers:
            overwrite(buffer, value)
        set_random_state(self.device, self._random)

    def _wrong(
        self, changed: Sequence[str], again: Sequence[str], wrong: Sequence[str] = ()
    ) -> str:
        """Return the error for a backward that failed, or gave another result."""
        if changed and not again:
            return self._keeps_state(changed)
        return self._reads_again(again, wrong)

    def _keeps_state(self, changed: Sequence[str]) -> str:
        what = _some(changed) if changed else "in no attribute of its modules"
        return (
            f"{self._where}, but keeps state between forwards ({what}): a second "
            "forward on the same values did not do what the first one did. Weights "
            "have a version for each step in flight; such state has only one. Let "
            "forward take it as an argument and return it, or start over each "
            "time; statistics that no gradient flows through belong in a buffer, "
            f"changed in place. {_FLUSHES}"
        )

    def _reads_again(self, again: Sequence[str], wrong: Sequence[str]) -> str:
        what = "something in it reads its weights again"
        what = f"{again[0]} runs again" if again else what
        result = f", so that the gradient of {_some(wrong)} is wrong" if wrong else ""
        return (
            f"{self._where}, but in the backward {what}, where the newest weights "
            f"stand{result}. If that is activation checkpointing: {CHECKPOINTING}. "
            f"{_FLUSHES}"
        )


_FLUSHES: Final = 'Or take a schedule that flushes, such as "1f1b"'


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return ", ".join(names[:_NUM_SHOWN]) + more


def _sample(grad: Tensor | None) -> list[Tensor]:
    if grad is None:
        return []
    flat = grad.to_dense().flatten()
    stride = max(1, flat.numel() // _NUM_SAMPLED) | 1  # odd: reads all columns
    return [flat[::stride].clone(), torch.linalg.vector_norm(flat)]
