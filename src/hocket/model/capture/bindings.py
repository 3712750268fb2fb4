"""Calls operators by PyTorch's own Python bindings, which are faster.

`torch.ops.aten.add.Tensor(a, b)` looks its arguments up in a schema; `torch.add(a, b)`
has a parser of its own and saves about 0.6 microseconds of 2. Both end in the same
operator. The graph of torch.export holds the first form, eager code uses the second.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, fx

from hocket.errors import DataError

aten = torch.ops.aten
Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]

# Operators whose binding takes the very same arguments.
_TORCH: Final = """
    abs.default add.Scalar add.Tensor addmm.default argmax.default baddbmm.default
    bitwise_and.Tensor bmm.default cat.default chunk.default
    clamp.default clone.default conv1d.default conv2d.default conv3d.default
    cos.default cumsum.default detach.default div.Scalar div.Tensor dropout.default
    dropout_.default embedding.default eq.Scalar eq.Tensor exp.default
    feature_dropout.default flatten.using_ints gather.default ge.Scalar ge.Tensor
    group_norm.default gt.Scalar gt.Tensor index_select.default layer_norm.default
    le.Scalar le.Tensor log.default log_softmax.int lt.Scalar lt.Tensor
    masked_fill.Scalar masked_fill.Tensor matmul.default max_pool2d.default mean.dim
    mm.default mul.Scalar mul.Tensor narrow.default ne.Scalar ne.Tensor neg.default
    ones_like.default pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor relu.default
    relu_.default rms_norm.default rsqrt.default rsub.Scalar select.int sigmoid.default
    sin.default softmax.int sqrt.default squeeze.dim stack.default sub.Scalar sub.Tensor
    sum.dim_IntList t.default tanh.default transpose.int tril.default triu.default
    unbind.int unsqueeze.default where.self zeros_like.default
"""
_NN: Final = """
    adaptive_avg_pool2d.default avg_pool2d.default gelu.default hardswish.default
    hardtanh.default leaky_relu.default linear.default log_sigmoid.default
    scaled_dot_product_attention.default silu.default
"""
# Methods that take a list of sizes or dimensions, one by one.
_SPREAD: Final = "view.default reshape.default permute.default expand.default"


def _named(names: str, home: Any) -> dict[Any, Callable[..., Any]]:
    return {_overload(name): getattr(home, _packet(name)) for name in names.split()}


def _packet(name: str) -> str:
    return name.split(".")[0]


def _overload(name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


def batch_norm(x: Tensor, *settings: Any) -> Tensor:
    """Normalize over a batch; the graph has lost the check of `F.batch_norm`.

    Args:
        x: (samples, channels, ...).
        settings: weight, bias, running mean and variance, whether to train, ...

    Raises:
        DataError: in training, each channel has one value: its variance is unknown, and
            the running variance would be NaN from then on.
    """
    if settings[4] and x.numel() == x.shape[1]:
        raise DataError(
            "a batch norm in training got one value per channel (its input has the "
            f"shape {tuple(x.shape)}): a microbatch needs at least 2 samples; use "
            "fewer microbatches, larger batches, or drop_last=True where the last "
            "batch is small"
        )
    return torch.batch_norm(x, *settings)


_OPERATORS: Final = {aten.add_.Tensor: operator.iadd, aten.mul_.Tensor: operator.imul}
FUNCTIONS: Final[Mapping[Any, Callable[..., Any]]] = {
    **_named(_TORCH, torch),
    **_named(_NN, torch._C._nn),
    **_OPERATORS,
    aten.batch_norm.default: batch_norm,
    aten.split.Tensor: torch._VF.split,  # type: ignore[attr-defined]
    aten.split_with_sizes.default: torch.split_with_sizes,
}
_METHODS: Final = {
    aten.contiguous.default: "contiguous",
    aten.to.dtype: "to",
    aten.to.dtype_layout: "to",
}
_METHOD_KEYWORDS: Final = ("dtype", "device", "memory_format")
_SPREAD_METHODS: Final = {_overload(name): _packet(name) for name in _SPREAD.split()}


def call(graph: fx.Graph, target: Any, args: Arguments, kwargs: Keywords) -> fx.Node:
    """Add a call to the graph, by the fastest binding of the operator."""
    if target in FUNCTIONS and not (target in _OPERATORS and kwargs):
        return graph.call_function(FUNCTIONS[target], args, dict(kwargs))
    if target in _SPREAD_METHODS and not kwargs:
        return graph.call_method(_SPREAD_METHODS[target], (args[0], *args[1]))
    if target in _METHODS:
        kept = {key: value for key, value in kwargs.items() if key in _METHOD_KEYWORDS}
        return graph.call_method(_METHODS[target], args, kept)
    if target is aten.slice.Tensor and (len(args) < 2 or args[1] >= 0):
        return _slice(graph, *args)
    return graph.call_function(target, args, dict(kwargs))


def rebind(module: fx.GraphModule) -> None:
    """Replace an inner graph's calls by fast bindings."""
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        with module.graph.inserting_before(node):
            new = call(module.graph, node.target, node.args, node.kwargs)
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
    module.recompile()


def _slice(
    graph: fx.Graph,
    value: fx.Node,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> fx.Node:
    """Slice by `x[:, a:b]`, which has a binding, unlike `aten.slice`."""
    before = (slice(None),) * dim
    index = (*before, slice(start, end, None if step == 1 else step))
    return graph.call_function(operator.getitem, (value, index))
