"""The deferred weight gradients of one microbatch: W."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hocket.model.trace.local import local
from hocket.run.stage.memory import num_bytes_held
from hocket.run.stage.split.layers.accumulate import accumulate
from hocket.run.stage.split.layers.call import DeferredCall


class Pending:
    """Layers' inputs and output gradients, in the order of the backward.

    Args:
        calls: each call with the gradient of its output.
    """

    def __init__(self, calls: Iterable[tuple[DeferredCall, Tensor]]) -> None:
        self._calls = deque(calls)

    @torch.no_grad()
    def finish(self) -> None:
        """Compute the weight gradients, and release one layer after the other.

        A parameter of several layers gets the sum of its gradients at once, added up
        in the order of the backward: that is autograd's order, too.
        """
        calls = self._calls
        again = _used_again(calls)
        sums: dict[int, Tensor] = {}
        while calls:
            call, dy = calls.popleft()
            dw, db = call.formula(call, dy)
            for parameter, grad in ((call.weight, dw), (call.bias, db)):
                if parameter is None or grad is None:
                    continue
                if again and id(parameter) in again:
                    _add(parameter, grad, again, sums)
                else:
                    accumulate(parameter, grad)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether it holds the memory of any of these tensors."""
        storages = [local(tensor).untyped_storage() for tensor in tensors]
        blocks = [(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages]
        held = [local(tensor).data_ptr() for tensor in self._held()]
        return bool([x for x in held for begin, end in blocks if begin <= x < end])

    @property
    def num_bytes(self) -> int:
        """The bytes that it holds, each block of memory once."""
        return num_bytes_held(self._held())

    def _held(self) -> list[Tensor]:
        return [x for call, dy in self._calls for x in (*call.inputs, dy)]


def _used_again(calls: Iterable[tuple[DeferredCall, Tensor]]) -> Counter[int]:
    """Return how often each parameter with several uses is used."""
    pairs = [(call.weight, call.bias) for call, _ in calls]
    used = [id(x) for pair in pairs for x in pair if x is not None]
    if len(set(used)) == len(used):
        return Counter()
    return Counter({key: num for key, num in Counter(used).items() if num > 1})


def _add(
    parameter: Tensor, grad: Tensor, uses: Counter[int], sums: dict[int, Tensor]
) -> None:
    """Add one of the uses of a parameter; the last one accumulates the sum."""
    key = id(parameter)
    uses[key] -= 1
    if key in sums:
        grad = sums.pop(key) + grad
    if uses[key]:
        sums[key] = grad
    else:
        accumulate(parameter, grad)
