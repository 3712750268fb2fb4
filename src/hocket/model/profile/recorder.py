"""Records the FLOPs and bytes of every operator that runs under it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from hocket.model.trace.observe import storage_of
from hocket.model.trace.per_sample import tensors_in

Counts = tuple[float, float, float]  # FLOPs, bytes, bytes that the pass itself made

_ATEN: Final = torch.ops.aten
_MAKES_NOTHING: Final = frozenset(
    {
        _ATEN.empty,
        _ATEN.empty_like,
        _ATEN.empty_strided,
        _ATEN.new_empty,
        _ATEN.new_empty_strided,
        _ATEN.detach,
        _ATEN.lift_fresh,
        _ATEN._local_scalar_dense,
    }
)
# Attention on CPUs, where counting happens, has its own operators.
_CPU_ATTENTION: Final = _ATEN._scaled_dot_product_flash_attention_for_cpu
_CPU_ATTENTION_BACK: Final = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
# These read as much of their table as they return.
_LOOKS_UP: Final = frozenset({_ATEN.embedding, _ATEN.index_select, _ATEN.gather})


class OperatorRecorder(TorchDispatchMode):
    """Records FLOPs and bytes of every operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Counts] = []
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", func)
        if packet in _MAKES_NOTHING or getattr(func, "is_view", False):
            return out
        written = tensors_in(out)
        if written:
            read = tensors_in((args, kwargs))
            live = [x for x in read if storage_of(x) in self._made]
            self._made.update(map(storage_of, written))
            self.ops.append(
                (
                    _flops(packet, args, kwargs, out),
                    _moved_bytes(packet, read, written),
                    float(sum(map(_size, [*live, *written]))),
                )
            )
        return out


def _flops(packet: Any, args: Any, kwargs: Any, out: Any) -> float:
    if packet is _CPU_ATTENTION:
        return float(sdpa_flop_count(*(x.shape for x in args[:3])))
    if packet is _CPU_ATTENTION_BACK:
        return float(sdpa_backward_flop_count(*(x.shape for x in args[:4])))
    formula = flop_registry.get(packet)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=out))


def _moved_bytes(
    packet: Any, read: Sequence[Tensor], written: Sequence[Tensor]
) -> float:
    """Return the bytes read and written; expanded tensors count by their memory."""
    if packet in _LOOKS_UP:
        return float(2 * sum(map(_size, written)))
    return float(sum(map(_size, [*read, *written])))


def _size(tensor: Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
