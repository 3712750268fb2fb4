"""The type that forwards compute in, and the loss scale for float16.

    name                weights     forwards     gradients add up in
    float32             as given    as given     the weights' types
    bfloat16, float16   float32     by autocast  float32
    bfloat16-weights    bfloat16    as given     float32, for masters (weights/masters)

bfloat16 has float32's range, so gradients survive as they are. float16 has not: the
loss is scaled up before the backward, and the gradients down again before the update.
If the scale is too large, some gradient is infinite, the step is skipped, and the scale
is halved; on all workers at once, since each has the norms of all gradients
(`hocket.run.weights.gradients`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from itertools import chain
from typing import ParamSpec, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from hocket.errors import ModelError

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Precision(Enum):
    """The type that forwards compute in."""

    FLOAT32 = "float32"  # no autocast
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    BFLOAT16_WEIGHTS = "bfloat16-weights"  # no autocast

    @property
    def is_autocast(self) -> bool:
        """Whether torch's autocast chooses the types of operators."""
        return self in (Precision.BFLOAT16, Precision.FLOAT16)

    @property
    def has_masters(self) -> bool:
        """Whether weights are copies in bfloat16 of those that are updated."""
        return self is Precision.BFLOAT16_WEIGHTS

    def autocast(
        self, device: torch.device, *, caches: bool = True
    ) -> AbstractContextManager[object]:
        """Return autocast's context; re-entered for each forward, never nested.

        Args:
            device: what is computed on.
            caches: whether weights that a forward reads twice are cast once. All
                threads share the cache, and any of them empties it.
        """
        if not self.is_autocast:
            return nullcontext()
        short = getattr(torch, self.value)
        return torch.autocast(device.type, short, cache_enabled=caches)

    def check_types(self, modules: Iterable[nn.Module]) -> None:
        """Refuse weights of types that do not go with this one.

        Raises:
            ModelError: a parameter is of float16 or bfloat16, and there is autocast:
                float16 gradients cannot be unscaled. Or none that is trained is of
                bfloat16, or one is of float16, where there are to be masters.
        """
        named = [*chain(*(x.named_parameters() for x in modules))]
        if self.has_masters:
            _check_masters(named)
        if not self.is_autocast:
            return
        for name, parameter in named:
            if parameter.dtype in (torch.float16, torch.bfloat16):
                raise ModelError(
                    f"precision={self.value!r} keeps the weights in float32 and "
                    f"computes in {self.value}, but {name} is {parameter.dtype}: give "
                    "the model in float32, or leave out precision="
                )

    @contextmanager
    def wide_gradients(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Let gradients of weights that have masters add up in float32 for a while.

        Afterwards they have the type in which they come, as before: that of the weight.
        """
        every = (p for x in modules for p in x.parameters()) if self.has_masters else ()
        # Weights of other workers' stages go while the pipeline is open: none is held.
        short = [ref(p) for p in every if p.requires_grad and p.dtype is torch.bfloat16]
        del modules, every
        _set_gradient_types(short, torch.float32)
        try:
            yield
        finally:
            _set_gradient_types(short, None)

    def make_scale(self, device: torch.device) -> LossScale | None:
        """Return a loss scale for float16; None for types that need none."""
        if self is not Precision.FLOAT16:
            return None
        return LossScale(torch.amp.GradScaler(device.type), device)

    def computing(
        self, device: torch.device, function: Callable[_P, _T]
    ) -> Callable[_P, _T]:
        """Return a function that computes in this type; itself without autocast."""
        if not self.is_autocast:
            return function
        computed: Callable[_P, _T]
        computed = torch.autocast(device.type, getattr(torch, self.value))(function)
        return computed


def _set_gradient_types(
    parameters: Iterable[ref[nn.Parameter]], dtype: torch.dtype | None
) -> None:
    for p in (x() for x in parameters):
        if p is not None:
            p.grad, p.grad_dtype = None, dtype


def _check_masters(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse types that have no masters.

    Raises:
        ModelError: see `Precision.check_types`.
    """
    option = f"precision={Precision.BFLOAT16_WEIGHTS.value!r}"
    trained = [(name, p) for name, p in named if p.requires_grad]
    for name, p in trained:
        if p.dtype is torch.float16:
            raise ModelError(
                f"{option} takes weights in bfloat16, and {name} is in float16, whose "
                "gradients need a loss scale: give the model in bfloat16 "
                "(model.to(torch.bfloat16))"
            )
    if trained and all(p.dtype is not torch.bfloat16 for _, p in trained):
        name, p = trained[0]
        raise ModelError(
            f"{option} takes a model in bfloat16, and none of its {len(trained)} "
            f"trained parameters is ({name} is in {str(p.dtype).removeprefix('torch.')}"
            "): give it as model.to(torch.bfloat16), and inputs in the same type; or "
            'take precision="bfloat16", which keeps weights as they are and casts in '
            "the forward"
        )


class LossScale:
    """The loss scale for float16, equal on all workers.

    torch's scaler looks for infinities in an optimizer's gradients. Here it looks at
    one number, the witness, whose gradient is infinite on every worker as soon as any
    gradient of any worker is.

    Args:
        scaler: torch's scaler, which keeps the state.
        device: the scale's device.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self.scaler = scaler
        self._witness = nn.Parameter(torch.zeros((), device=device))
        self._optimizer = torch.optim.SGD([self._witness], lr=0.0)
        scaler.scale(self._witness.detach())  # until then it has no state

    @property
    def value(self) -> float:
        """The factor of this step's loss."""
        return self.scaler.get_scale()

    def unscale(self, grads: Sequence[Tensor]) -> None:
        """Divide gradients by the factor, in place."""
        if grads:
            torch._foreach_mul_(list(grads), 1.0 / self.value)

    def update(self, *, overflowed: bool) -> None:
        """Halve the factor after an overflow; raise it after many good steps."""
        found = math.inf if overflowed else 0.0
        self._witness.grad = torch.full_like(self._witness, found)
        self.scaler.unscale_(self._optimizer)
        self.scaler.update()
