"""Counts what each layer computes and moves, on fake tensors, without running it.

Fake tensors have shapes and an autograd graph but no data, so a model of any size is
counted on any machine. Each layer runs as a stage of its own, forward and backward, and
every operator that reaches the dispatcher is recorded:

    FLOPs   of matrix multiplications, convolutions and attention (torch's own formulas)
    bytes   read and written, each piece of memory once; none for views
    live    those of these bytes that the pass itself has made: its work space

It is done for two numbers of samples. Between them every count grows evenly, so the
counts of any other number lie on the straight line through the two.

Records the FLOPs and bytes of every operator that runs under it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from hocket.model.capture.captured import Captured
from hocket.model.profile.measure import restored_model
from hocket.model.profile.passes import detached, gradients_of, sum_of_outputs
from hocket.model.stages.cut import cut
from hocket.model.trace.observe import storage_of
from hocket.model.trace.per_sample import tensors_in
from hocket.model.trace.state import gradient_type
from hocket.planner.work import Affine, LayerOps, Ops, Weights

Finish = Callable[[Any, int], Tensor]  # (the model's output, number of samples)

_HALF: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def count_layers(
    captured: Captured,
    weights: Sequence[tuple[Weights, ...]],
    *,
    finish: Finish | None = None,
    precision: str = "float32",
) -> tuple[LayerOps, ...]:
    """Count what each layer computes and moves, forward and backward.

    The model is not run, and nothing of it is changed.

    Args:
        captured: the model; its tensors may be on the meta device.
        weights: the weights of each layer, in the planner's form.
        finish: makes a scalar of the model's output (the loss), which then counts as
            part of the last layer. If it fails without data, or is not given, the sum
            of all outputs replaces it.
        precision: "bfloat16" and "float16" mean autocast.
    """
    num_samples = captured.example.num_samples
    first = num_samples if captured.fixed_batch else max(2, num_samples)
    sizes = (first, first if captured.fixed_batch else first + 1)
    half = _HALF.get(precision)
    with restored_model(captured, torch.device("cpu")):
        try:
            counts = [_Counting(captured, size, finish, half).all() for size in sizes]
        except Exception:
            if finish is None:
                raise
            counts = [_Counting(captured, size, None, half).all() for size in sizes]
    return tuple(
        _layer(captured.layers[i].name, sizes, a, b, weights[i])
        for i, (a, b) in enumerate(zip(*counts, strict=True))
    )


@dataclass(slots=True)
class _Count:
    """The counts of one layer, for one number of samples.

    Args:
        forward: the counts of each operator.
        backward: those of the whole backward.
        input_grad: those of a backward for the input's gradient alone.
        made_bytes: what the forward makes and keeps.
        kept_input_bytes: what it keeps of its input.
        received_bytes: the bytes of its input.
        received_grad_bytes: the bytes of the part of it that a gradient comes back for.
    """

    forward: list[Counts] = field(default_factory=list)
    backward: list[Counts] = field(default_factory=list)
    input_grad: list[Counts] = field(default_factory=list)
    made_bytes: int = 0
    kept_input_bytes: int = 0
    received_bytes: int = 0
    received_grad_bytes: int = 0


class _Counting:
    """Runs one number of samples through all layers and back, twice."""

    def __init__(
        self,
        captured: Captured,
        num_samples: int,
        finish: Finish | None,
        half: torch.dtype | None,
    ) -> None:
        self._pieces = [
            piece.train() for piece in cut(captured, range(1, len(captured.layers)))
        ]
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        example = captured.example.resized(num_samples)
        self._leaves = example.mapped(self._faked).leaves
        self._state = [
            {
                name: self._faked(x)
                for name, x in (*piece.named_parameters(), *piece.named_buffers())
            }
            for piece in self._pieces
        ]
        self._num_samples = num_samples
        self._finish = finish
        self._half = half
        there = [x for state in self._state for x in state.values()]
        there += tensors_in(list(self._leaves))  # the batch is there anyway
        self._seen = set(map(storage_of, there))

    def all(self) -> list[_Count]:
        """Return the counts of every layer."""
        counts = [_Count() for _ in self._pieces]
        with self._fake, torch.enable_grad():
            for state in self._state:
                for x in state.values():
                    if x.requires_grad:  # all microbatches but the first add to it
                        x.grad = torch.zeros_like(x, dtype=gradient_type(x))
            self._pass(counts, only_inputs=False)
            self._pass(counts, only_inputs=True)
        return counts

    def _pass(self, counts: Sequence[_Count], *, only_inputs: bool) -> None:
        live = []
        alive: list[Any] = []  # so that no storage's address is used twice
        received: tuple[Tensor, ...] = ()
        for i, (piece, count) in enumerate(zip(self._pieces, counts, strict=True)):
            received = detached(received, piece)
            with OperatorRecorder() as recorder:
                out = self._forward(i, received, None if only_inputs else count)
            if not only_inputs:
                count.forward = recorder.ops
                count.received_bytes = sum(x.nbytes for x in received)
                wanted = (x.nbytes for x in received if x.requires_grad)
                count.received_grad_bytes = sum(wanted)
            leaves = [x for x in received if x.requires_grad]
            live.append((leaves, [x for x in out if x.requires_grad]))
            alive += [received, out]
            received = out
        grads: Sequence[Tensor] = [torch.ones_like(x) for x in live[-1][1]]
        for (leaves, outputs), count in zip(live[::-1], counts[::-1], strict=True):
            with OperatorRecorder() as recorder:
                grads = gradients_of(leaves, outputs, grads, only_inputs=only_inputs)
            if only_inputs:
                count.input_grad = recorder.ops
            else:
                count.backward = recorder.ops

    def _forward(
        self, i: int, received: tuple[Tensor, ...], count: _Count | None
    ) -> tuple[Tensor, ...]:
        piece = self._pieces[i]
        own = [self._leaves[leaf] for leaf in piece.batch_inputs]
        from_before = {storage_of(x) for x in received}
        watch = nullcontext() if count is None else self._kept(count, from_before)
        with watch, self._autocast(own, received):
            out = functional_call(piece, self._state[i], (*received, *own))
            if i + 1 == len(self._pieces):
                out = (self._end(out),)
        return tuple(out)

    def _faked(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor; on a CPU, if it is on the meta device."""
        if tensor.device.type != "meta":
            return self._fake.from_tensor(tensor)
        with self._fake:
            faked = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
        return faked.requires_grad_(tensor.requires_grad)

    def _autocast(self, *values: Sequence[Any]) -> AbstractContextManager[Any]:
        if self._half is None:
            return nullcontext()
        tensors = tensors_in(values)
        kind = tensors[0].device.type if tensors else "cpu"
        return torch.autocast(kind, dtype=self._half)

    def _end(self, out: Any) -> Tensor:
        if self._finish is not None:
            return self._finish(out, self._num_samples)
        return sum_of_outputs(out)

    @contextmanager
    def _kept(self, count: _Count, from_before: set[int]) -> Iterator[None]:
        """Count what autograd saves in the block, each piece of memory once."""

        def pack(tensor: Tensor) -> Tensor:
            storage = storage_of(tensor)
            if storage not in self._seen:
                self._seen.add(storage)
                if storage in from_before:
                    count.kept_input_bytes += tensor.untyped_storage().nbytes()
                else:
                    count.made_bytes += tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


def _layer(
    name: str,
    sizes: tuple[int, int],
    a: _Count,
    b: _Count,
    weights: tuple[Weights, ...],
) -> LayerOps:
    def line(what: str) -> Affine:
        return Affine.through(sizes, (getattr(a, what), getattr(b, what)))

    return LayerOps(
        name,
        _ops(sizes, a.forward, b.forward),
        _ops(sizes, a.input_grad, b.input_grad),
        _ops(sizes, a.backward, b.backward),
        line("made_bytes"),
        line("kept_input_bytes"),
        line("received_bytes"),
        line("received_grad_bytes"),
        weights,
    )


def _ops(sizes: tuple[int, int], a: Sequence[Counts], b: Sequence[Counts]) -> Ops:
    """Return lines through the operators' counts; through the origin if they differ."""
    if len(a) != len(b):
        sizes, b = (sizes[0], sizes[0]), a
    first = np.array(a, float).reshape(-1, 3).T
    second = np.array(b, float).reshape(-1, 3).T
    if sizes[0] == sizes[1]:
        fixed, slope = np.zeros_like(first), first / sizes[0]
    else:
        slope = (second - first) / (sizes[1] - sizes[0])
        fixed = first - slope * sizes[0]
    return Ops(*(np.stack(pair) for pair in zip(fixed, slope, strict=True)))


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
