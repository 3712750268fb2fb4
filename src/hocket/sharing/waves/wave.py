"""One wave: a copy of the model, its optimizer, and the gradients that are due."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import ModelError, NonFiniteError
from hocket.model.guards.guards import Guards, ModelChange, Noted, note_changes
from hocket.model.trace.observe import is_random
from hocket.model.trace.state import named_tensors, saved_tensors
from hocket.run.data.batch import Microbatch
from hocket.run.data.loss import TOTAL
from hocket.run.device.operator_mode import OperatorMode
from hocket.run.stage.split.layers.accumulate import has_hooks
from hocket.run.weights.settings import TrainingConfig
from hocket.run.weights.updater import Updater

Gradients: TypeAlias = list[Tensor | None]  # of all parameters, in the model's order


@dataclass(frozen=True, slots=True)
class Due:
    """The gradients of one batch, which updates are to read.

    Args:
        num_samples: the samples of the batch, over all replicas.
        gradients: this replica's part of their sum.
    """

    num_samples: int
    gradients: Gradients


class Wave:
    """One wave and its copy of the model.

    Args:
        module: its copy of the model.
        settings: makes its optimizer; None if another wave's updates its weights.

    Attributes:
        parameters: those that are trained, in the model's order.
        updater: its optimizer and learning-rate schedule; None without `settings`.
    """

    def __init__(self, module: nn.Module, settings: TrainingConfig | None) -> None:
        self.module = module
        named = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.parameters = list(named.values())
        self.updater = None if settings is None else Updater(named, settings)

    def state(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers, each tied tensor once."""
        seen: dict[int, str] = {}
        found = saved_tensors(self.module)
        return {
            name: x.detach()
            for name, x in found.items()
            if seen.setdefault(id(x), name) == name
        }

    def buffers(self) -> dict[str, Tensor]:
        """Return the persistent buffers."""
        names = {name for name, _ in self.module.named_parameters()}
        return {name: x for name, x in self.state().items() if name not in names}

    def take_gradients(self, num_samples: int) -> Due:
        """Return the gradients of a whole batch: the next one begins with none.

        Args:
            num_samples: the samples of the batch, over all replicas.
        """
        found = Due(num_samples, [parameter.grad for parameter in self.parameters])
        self.put_gradients([None] * len(self.parameters))
        return found

    def put_gradients(self, gradients: Gradients) -> None:
        """Set the gradients that the optimizer reads."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def share_weights_of(self, other: Wave) -> None:
        """Compute with another wave's weights, and keep gradients of its own."""
        pairs = zip(self.module.parameters(), other.module.parameters(), strict=True)
        for mine, theirs in pairs:
            mine.data = theirs.data

    def share_buffers_of(self, other: Wave) -> None:
        """Go on with the buffers that another wave's last forward has left."""
        pairs = zip(self.module.modules(), other.module.modules(), strict=True)
        for mine, theirs in pairs:
            mine._buffers.update(theirs._buffers)

    def follow(self, other: Wave) -> None:
        """Run another wave's module as it is now, on this wave's own tensors.

        Raises:
            ModelError: it cannot be copied.
        """
        own, module = self._tensors(), copy_of(other.module)
        for path, part in module.named_modules(remove_duplicate=False):
            for held in (part._parameters, part._buffers):
                for name, x in held.items():
                    if x is not None:
                        held[name] = own[f"{path}.{name}" if path else name]
                        held[name].requires_grad_(x.requires_grad)
        self.module = module

    def has_names_of(self, other: Wave) -> bool:
        """Whether another wave's module has weights and buffers of the same names."""
        return self._tensors().keys() == other._tensors().keys()

    def _tensors(self) -> dict[str, Any]:
        """Return parameters and buffers under all of their names."""
        return named_tensors(self.module)

    def skip_batch(self) -> None:
        """Step the learning-rate schedule, and averages, for a batch of the other wave.

        So the rates of update `n` are those of a job that makes all updates itself, and
        averages forget as many batches.
        """
        assert self.updater is not None
        with warnings.catch_warnings():  # tock's first step is before its update
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step()")
            self.updater.advance()


class LoopChanges:
    """What a loop changes in the user's module, tick's, and tock is to follow.

    Args:
        waves: tick and tock.
        is_exact: whether both have the weights of one optimizer.

    Attributes:
        noted: what tock has not followed yet.
    """

    def __init__(self, waves: tuple[Wave, Wave], *, is_exact: bool) -> None:
        self._waves = waves
        # Of changes that what is made for each wave's tensors knows.
        self._known = {"", "module", *(("buffer", "trained") if is_exact else ())}
        self._guards = Guards(waves[0].module)
        self.noted: Noted = {}

    def note(self) -> None:
        """Note what has changed, but for what both waves read outside."""
        changes = self._guards.changes()
        note_changes(self.noted, (x for x in changes if not x.is_outside))

    def forget(self) -> None:
        """Leave out what forwards have changed since `note`, and not the loop."""
        self._guards.forget()

    def refuse(self, step: int, *, is_idle: bool) -> None:
        """Refuse what cannot be followed.

        Args:
            step: the next step.
            is_idle: whether no other step is under way.

        Raises:
            ModelError: names the change, both values and the step.
        """
        for name, parameter in self._waves[0].module.named_parameters():
            if has_hooks(parameter):
                raise ModelError(
                    f"before step {step}, {name} has a hook on its gradient, of which "
                    "the other wave's weight knows nothing: let the optimizer's step "
                    "do what it does, or take hocket.Pipeline"
                )
        changes = [*self.noted.values()]
        unknown = [x for x in changes if not self._is_known(x)]
        if changes and not is_idle:
            why = (
                "batches are under way that would see it: change it where none is "
                "(`drain_every`, or `step(batch)` in place of `train(loader)`)"
            )
        elif unknown or (changes and not self._waves[1].has_names_of(self._waves[0])):
            why = (
                "each wave has weights and an optimizer that are made for what was "
                "there: save, and make new waves of the model"
            )
        else:
            return
        first = (unknown or changes)[0]
        raise ModelError(
            f"before step {step}, {first}, which cannot be followed: {why}"
        )

    def follow(self) -> None:
        """Let tock follow what is noted; nothing may be under way.

        Raises:
            ModelError: the module cannot be copied.
        """
        self._waves[1].follow(self._waves[0])
        self.noted.clear()

    def _is_known(self, change: ModelChange) -> bool:
        now = dict(self._waves[0].module.named_modules()).get(change.name)
        has_state = change.kind == "module" and now is not None and saved_tensors(now)
        return change.kind in self._known and not has_state


def copy_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model.

    Raises:
        ModelError: it cannot be copied.
    """
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            f"the second wave needs a copy of the model, and copy.deepcopy failed: "
            f"{type(error).__name__}: {error}. Make what cannot be copied outside of "
            "the model, or give the class a __deepcopy__"
        ) from error


def mean_gradients(own: Due, before: Due | None) -> Gradients:
    """Return the mean of the gradients of two batches, weighted by their samples.

    Args:
        own: the gradients of the wave whose weights are updated.
        before: the gradients of the batch before; None if there is none.

    Returns:
        New tensors: each batch is read once more. None where none has a gradient.
    """
    if before is None:
        return [None if x is None else x.clone() for x in own.gradients]
    share = own.num_samples / (own.num_samples + before.num_samples)
    found: Gradients = []
    for mine, theirs in zip(own.gradients, before.gradients, strict=True):
        if theirs is None:
            found.append(None if mine is None else mine * share)
        elif mine is None:
            found.append(theirs * (1.0 - share))
        else:
            found.append(torch.lerp(theirs, mine, share))
    return found


def sum_gradients(own: Due, other: Due) -> Gradients:
    """Return the sum of two waves' gradients; adds to `own`'s in place."""
    found: Gradients = []
    for mine, theirs in zip(own.gradients, other.gradients, strict=True):
        if mine is None or theirs is None:
            found.append(theirs if mine is None else mine)
        else:
            found.append(mine.add_(theirs))
    return found


def tensors_of(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the gradients that there are."""
    return [x for x in gradients if x is not None]


class DrawDetector(OperatorMode):
    """Notes whether an operator draws random numbers.

    Attributes:
        has_drawn: whether any has.
    """

    has_drawn = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the operator."""
        self.has_drawn |= is_random(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class WaveStep:
    """A step under way.

    Args:
        number: the step's number.
        parts: its microbatches on this replica.
        spec: how their leaves are the model's arguments.
        num_samples: the samples of the batch, over all replicas.
        names: the losses' names.
        losses: their weighted sums over the microbatches so far, in one tensor.
        totals: the losses whose backward is to come, by microbatch.
        norm: the norm of the gradients that the update read.
        is_skipped: whether nothing was updated, as float16 has overflowed.
    """

    number: int
    parts: tuple[Microbatch, ...]
    spec: pytree.TreeSpec
    num_samples: int
    names: tuple[str, ...] = ()
    losses: Tensor | None = None
    totals: dict[int, Tensor] = field(default_factory=dict)
    norm: Tensor | None = None
    is_skipped: bool = False


@dataclass(frozen=True, slots=True)
class WaveResult:
    """What one batch came to. Every worker gets the same numbers.

    Args:
        step: the batch's number, from 0 over the life of the run.
        wave: the wave whose weights were updated: 0 for tick, 1 for tock; 0 for both if
            sync is "exact".
        loss: what is trained, the mean over all samples of the batch.
        losses: every scalar that the loss function names, the means over all samples.
        num_samples: the samples of the batch, over all replicas.
        grad_norm: the norm of the gradients that the update read, before clipping.
        seconds: since the result before.
        skipped: whether nothing was updated, for gradients of float16 were too large.
    """

    step: int
    wave: int
    loss: float
    losses: dict[str, float]
    num_samples: int
    grad_norm: float
    seconds: float
    skipped: bool = False


def result_of(step: WaveStep, wave: int) -> WaveResult:
    """Return what a step came to, without its seconds.

    Args:
        step: one whose losses and norm are there.
        wave: the wave whose weights were updated.

    Raises:
        NonFiniteError: a loss or a gradient is not finite.
    """
    assert step.losses is not None
    assert step.norm is not None
    losses = dict(zip(step.names, step.losses.tolist(), strict=True))
    norm = float(step.norm)
    bad = [name for name, value in losses.items() if not isfinite(value)]
    if not step.is_skipped and (bad or not isfinite(norm)):
        what = f"the loss {bad[0]!r}" if bad else "a gradient"
        raise NonFiniteError(
            f"{what} of step {step.number} is not finite, and weights were updated "
            "from it before this was known: load the last checkpoint"
        )
    return WaveResult(
        step.number,
        wave,
        losses[TOTAL],
        losses,
        step.num_samples,
        norm,
        0.0,
        step.is_skipped,
    )
