"""Traces recurrent layers as their steps in time, or LSTMs as their device's kernels.

    steps in time   F: four products each  I: the same, backwards  W: one product of all
    fused           F: one operator        I: one operator, which makes dW too

F is the forward, I the gradient of the inputs, W the gradient of the weights (dW). The
fused kernels are cuDNN's on a GPU, for all layers at once, and oneDNN's on a CPU in
float32, for one layer in one direction. They are operators of their own here, since
torch's have no shapes without memory (cuDNN's backward), or depend on the gradient mode
of the thread that runs them (oneDNN's).

Steps in time are torch's decomposition, which loses the dropout between layers: so each
layer is called by itself where there is any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from hocket import cuda
from hocket.errors import CaptureError

_aten = torch.ops.aten
_RECURRENT: Final = torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu
_WATCHES: Final = Tensor.register_hook, Tensor.retain_grad
_LSTM: Final = 2  # among cuDNN's and oneDNN's kinds of recurrent layers
_NUM_GATES: Final = 4
_CUDNN: Final[dict[str, Any]] = {
    "dropout": 0.0,
    "train": True,
    "batch_sizes": [],
    "dropout_state": None,
}
_ONEDNN: Final[dict[str, Any]] = {
    "reverse": False,
    "batch_sizes": [],
    "mode": _LSTM,
    "num_layers": 1,
    "has_biases": True,
    "bidirectional": False,
    "batch_first": False,
    "train": True,
}


@torch.library.custom_op("hocket::lstm", mutates_args=())
def lstm(
    x: Tensor, hx: Tensor, cx: Tensor, weights: list[Tensor], is_bidirectional: bool
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Run the fused forward.

    Shapes: T steps, B samples, I inputs, H hidden values, L = layers x directions.

    Args:
        x: TBI.
        hx: LBH; on a CPU, L is 1.
        cx: LBH.
        weights: for each layer and direction `w_ih`, `w_hh`, `b_ih`, `b_hh`.
        is_bidirectional: whether there are two directions.

    Returns:
        The outputs TBH (or TB2H), the last hidden and cell states LBH, and what the
        backward needs.
    """
    weights = [weight.detach() for weight in weights]
    if x.is_cuda:
        shape = _cudnn_shape(hx, is_bidirectional)
        buffer = torch._cudnn_rnn_flatten_weight(
            weights, input_size=x.shape[2], **shape
        )
        y, hy, cy, reserve, buffer = _aten._cudnn_rnn(
            x.contiguous(), weights, weight_buf=buffer, hx=hx, cx=cx, **shape, **_CUDNN
        )
        return y, hy, cy, [reserve, buffer]
    with torch.enable_grad():  # else it makes nothing for the backward
        made = _aten.mkldnn_rnn_layer(
            *(x.contiguous().detach(), *weights, hx.detach(), cx.detach()),
            hidden_size=hx.shape[2],
            **_ONEDNN,
        )
    return (*(one.detach() for one in made[:3]), [made[3]])


def _cudnn_shape(hx: Tensor, is_bidirectional: bool) -> dict[str, Any]:
    return {
        "weight_stride0": _NUM_GATES,
        "mode": _LSTM,
        "hidden_size": hx.shape[2],
        "proj_size": 0,
        "num_layers": hx.shape[0] // (1 + is_bidirectional),
        "batch_first": False,
        "bidirectional": is_bidirectional,
    }


@lstm.register_fake
def _(
    x: Tensor, hx: Tensor, cx: Tensor, weights: list[Tensor], is_bidirectional: bool
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    width = hx.shape[2] * (1 + is_bidirectional)
    sizes = _num_saved(
        *(x.shape, hx.shape, x.dtype, x.device),
        tuple(weight.shape for weight in weights),
        is_bidirectional,
    )
    on_gpu = x.device.type == "cuda"
    dtypes = [torch.uint8, x.dtype] if on_gpu else [torch.uint8]
    saved = [x.new_empty(n, dtype=t) for n, t in zip(sizes, dtypes, strict=True)]
    y = x.new_empty((*x.shape[:2], width))
    return y, hx.new_empty(hx.shape), cx.new_empty(cx.shape), saved


@cache
def _num_saved(
    x: torch.Size,
    hx: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    weights: tuple[torch.Size, ...],
    is_bidirectional: bool,
) -> list[int]:
    """Return how many elements the forward keeps; the libraries alone know it."""
    if device.type == "cuda" and not cuda.is_available():
        return [0, sum(weight.numel() for weight in weights)]
    with _disable_current_modes(), torch.no_grad():
        shapes = (x, hx, hx, *weights)
        first, *rest = (torch.zeros(s, dtype=dtype, device=device) for s in shapes)
        *_, saved = lstm(first, rest[0], rest[1], rest[2:], is_bidirectional)
    return [tensor.numel() for tensor in saved]


@torch.library.custom_op("hocket::lstm_backward", mutates_args=())
def lstm_backward(
    x: Tensor,
    hx: Tensor,
    cx: Tensor,
    weights: list[Tensor],
    is_bidirectional: bool,
    made: list[Tensor],
    saved: list[Tensor],
    grads: list[Tensor],
) -> list[Tensor]:
    """Run the fused backward.

    Args:
        x: the forward's inputs TBI.
        hx: the first hidden states LBH.
        cx: the first cell states LBH.
        weights: for each layer and direction, as in the forward.
        is_bidirectional: whether there are two directions.
        made: the outputs, and the last hidden and cell states.
        saved: what the forward has kept.
        grads: the gradients of what was made.

    Returns:
        The gradients of `x`, `hx`, `cx` and the weights, each in memory of its own.
    """
    grads = [grad.contiguous() for grad in grads]
    if x.is_cuda:
        reserve, buffer = saved
        dx, dhx, dcx, dws = _aten._cudnn_rnn_backward(
            *(x.contiguous(), weights),
            weight_buf=buffer,
            hx=hx,
            cx=cx,
            output=made[0],
            grad_output=grads[0],
            grad_hy=grads[1],
            grad_cy=grads[2],
            **_cudnn_shape(hx, is_bidirectional),
            **_CUDNN,
            reserve=reserve.clone(),  # it overwrites the reserve
            output_mask=[True] * 4,
        )
        return [dx, dhx, dcx, *(dw.clone() for dw in dws)]
    dx, dw_ih, dw_hh, db, _, dhx, dcx = _aten.mkldnn_rnn_layer_backward(
        *(x.contiguous(), *weights, hx, cx, *made, *grads),
        hidden_size=hx.shape[2],
        workspace=saved[0],
        **_ONEDNN,
    )
    return [dx, dhx, dcx, dw_ih, dw_hh, db, db.clone()]


@lstm_backward.register_fake
def _(
    x: Tensor, hx: Tensor, cx: Tensor, weights: list[Tensor], *_: Any
) -> list[Tensor]:
    return [one.new_empty(one.shape) for one in (x, hx, cx, *weights)]


FUSED_LSTM: Final = torch.ops.hocket.lstm.default


class _Lstm(torch.autograd.Function):
    """The fused kernels, for autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        is_bidirectional: bool,
        x: Tensor,
        hx: Tensor,
        cx: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        *made, saved = lstm(x, hx, cx, list(weights), is_bidirectional)
        ctx.is_bidirectional, ctx.num_weights = is_bidirectional, len(weights)
        ctx.save_for_backward(x, hx, cx, *weights, *made, *saved)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, hx, cx, *rest = ctx.saved_tensors
        num = ctx.num_weights
        weights, made, saved = rest[:num], rest[num : num + 3], rest[num + 3 :]
        given = x, hx, cx, weights, ctx.is_bidirectional
        return None, *lstm_backward(*given, made, saved, list(grads))


_apply: Callable[..., tuple[Tensor, Tensor, Tensor]] = _Lstm.apply


class RnnTracing(TorchFunctionMode):
    """Decides how recurrent layers are traced while it is active; refuses hooks.

    Packed sequences, projections and layers without biases are traced as their steps in
    time. Packed sequences have the sizes of their batches where others have the state.

    Args:
        fuses: call an LSTM's fused kernels where the device has them.
    """

    def __init__(self, *, fuses: bool) -> None:
        super().__init__()
        self._fuses = fuses

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch's, or what takes its place."""
        if func in _WATCHES:
            raise CaptureError(
                f"forward calls {func.__name__} of a tensor, which a graph would lose"
            )
        if func not in _RECURRENT or kwargs:
            return func(*args, **(kwargs or {}))
        is_packed = not isinstance(args[3], bool)
        num_layers, dropout, is_training = args[4 + is_packed : 7 + is_packed]
        draws = dropout > 0 and is_training and num_layers > 1
        if draws and args[0].is_cuda and torch.backends.cudnn.enabled:
            raise CaptureError(
                f"cuDNN draws the numbers of the dropout between the {num_layers} "
                "layers of a recurrent module, and no other kernel draws the same: use "
                "modules of one layer, with nn.Dropout between them"
            )
        if self._fuses and func is torch.lstm and not is_packed and _is_fusible(*args):
            return _fused(*args)
        with _without_onednn():
            return _by_layer(func, is_packed, *args) if draws else func(*args)


def _by_layer(func: Any, is_packed: bool, x: Tensor, *args: Any) -> tuple[Any, ...]:
    """Run each layer by itself, with dropout between them.

    Args:
        func: the function of the recurrent layers.
        is_packed: whether the samples' numbers of steps differ.
        x: the inputs.
        args: what else the function takes.
    """
    sizes = args[:is_packed]
    state, weights, has_biases, num, dropout, is_training, both, *rest = args[
        is_packed:
    ]
    batch_first = any(rest)
    x = x.transpose(0, 1) if batch_first else x
    states = [state] if isinstance(state, Tensor) else state
    layers = zip(*(one.chunk(num) for one in states), strict=True)
    made: list[tuple[Tensor, ...]] = []
    for own, given in zip(_groups(weights, len(weights) // num), layers, strict=True):
        if made and is_training:
            x = torch.dropout(x, dropout, train=True)
        first = given[0] if isinstance(state, Tensor) else given
        more = *sizes, first, own, has_biases, 1, 0.0, is_training, both
        x, *new = func(x, *more, *(False for _ in rest))
        made.append(tuple(new))
    new = [torch.cat(one) for one in zip(*made, strict=True)]
    return (x.transpose(0, 1) if batch_first else x), *new


def is_fused(graph: fx.Graph) -> bool:
    """Return whether a graph has fused LSTMs."""
    return any(graph.find_nodes(op="call_function", target=FUSED_LSTM))


def has_lstm(model: nn.Module) -> bool:
    """Return whether a model has layers that may be fused."""
    return any(isinstance(module, nn.LSTM) for module in model.modules())


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Trace steps in time: torch's oneDNN layer keeps nothing without autograd."""
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)


def _is_fusible(
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    *_: Any,
) -> bool:
    if not has_biases or state[0].shape[2] != state[1].shape[2] or not x.numel():
        return False
    if x.device.type == "cuda":
        return torch.backends.cudnn.enabled
    dtypes = {tensor.dtype for tensor in (x, *state, *weights)}
    on_cpu = x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    return on_cpu and dtypes == {torch.float32} and torch._C._get_mkldnn_enabled()


def _fused(x: Tensor, state: Sequence[Tensor], *args: Any) -> tuple[Any, ...]:
    """Call the fused kernels in the place of `torch.lstm`."""
    if not x.is_cuda:
        return _by_layer(_onednn_layer, False, x, state, *args)
    weights, is_bidirectional, batch_first = args[0], *args[-2:]
    x = x.transpose(0, 1) if batch_first else x
    y, hy, cy = _on_gpu(x, state, weights, is_bidirectional)
    return (y.transpose(0, 1) if batch_first else y), hy, cy


def _on_gpu(
    x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], both: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run all layers at once; under autocast in float16, as torch does."""
    tensors = [x, *(one.contiguous() for one in state), *weights]
    if torch.is_autocast_enabled("cuda"):
        tensors = [tensor.half() for tensor in tensors]
    with torch.autocast("cuda", enabled=False):
        y, hy, cy = _apply(both, *tensors)
    return y, hy, cy


def _onednn_layer(
    x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Run each direction of one layer by itself, as torch does with oneDNN."""
    made: list[tuple[Tensor, Tensor, Tensor]] = []
    for i, own in enumerate(_groups(weights, _NUM_GATES)):
        hx, cx = (one[i : i + 1].contiguous() for one in state)
        y, hy, cy = _apply(False, x.flip(0) if i else x, hx, cx, *own)
        made.append((y.flip(0) if i else y, hy, cy))
    ys, hys, cys = zip(*made, strict=True)
    y = torch.cat(ys, 2) if len(ys) > 1 else ys[0]
    return y, torch.cat(hys), torch.cat(cys)


def _groups(tensors: Sequence[Tensor], size: int) -> Iterator[Sequence[Tensor]]:
    for begin in range(0, len(tensors), size):
        yield tensors[begin : begin + size]
