"""What one microbatch's backward leaves for W, and W itself."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hocket.run.split.accumulate import accumulate
from hocket.run.split.call import Call


class Pending:
    """Layers' inputs and output gradients, in the order of the backward.

    Args:
        calls: each with the gradient of its output.
    """

    def __init__(self, calls: Iterable[tuple[Call, Tensor]]) -> None:
        self._calls = deque(calls)

    @torch.no_grad()
    def finish(self) -> None:
        """Compute the weight gradients, and give back one layer after the other.

        A parameter of several layers gets the sum of its gradients at once, added up
        in the order of the backward: that is autograd's order, too.
        """
        uses = Counter(id(x) for call, _ in self._calls for x in call.parameters)
        sums: dict[int, Tensor] = {}
        while self._calls:
            call, dy = self._calls.popleft()
            pair = call.formula(call, dy)
            for parameter, grad in zip((call.weight, call.bias), pair, strict=True):
                if parameter is not None and grad is not None:
                    self._add(parameter, grad, uses, sums)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it holds on to the memory of any of them."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        blocks = [(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages]
        return any(
            begin <= tensor.data_ptr() < end
            for tensor in self._held()
            for begin, end in blocks
        )

    @property
    def num_bytes(self) -> int:
        """All that it holds, each block of memory once."""
        storages = [x.untyped_storage() for x in self._held()]
        return sum({x.data_ptr(): x.nbytes() for x in storages}.values())

    def _held(self) -> Iterable[Tensor]:
        for call, dy in self._calls:
            yield from call.inputs
            yield dy

    def _add(
        self,
        parameter: Tensor,
        grad: Tensor,
        uses: Counter[int],
        sums: dict[int, Tensor],
    ) -> None:
        key = id(parameter)
        uses[key] -= 1
        if key in sums:
            grad = sums.pop(key) + grad
        if uses[key]:
            sums[key] = grad
        else:
            accumulate(parameter, grad)
