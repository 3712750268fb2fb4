"""The fast bindings do what the operators do that they replace."""

from __future__ import annotations

import operator
from typing import Any, Final

import pytest
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from hocket.errors import DataError
from hocket.model.capture import bindings

aten = torch.ops.aten
A: Final = torch.linspace(-2.0, 3.0, 24).view(2, 3, 4)
B: Final = torch.linspace(1.0, 2.0, 24).view(2, 3, 4)
IMAGE: Final = torch.linspace(-1.0, 1.0, 2 * 4 * 6 * 6).view(2, 4, 6, 6)
INDEX: Final = torch.tensor([[0, 2], [1, 0]])
TRUE: Final = A > 0
V4: Final = torch.linspace(0.5, 1.5, 4)
M44: Final = torch.linspace(-1.0, 1.0, 16).view(4, 4)

_ONE: Final = (
    "abs clone cos detach exp gelu hardswish hardtanh leaky_relu log_sigmoid neg "
    "ones_like relu relu_ sigmoid silu sin tanh tril triu zeros_like"
)
_TWO: Final = "add div eq ge gt le lt mul ne sub"
ARGUMENTS: Final[dict[Any, tuple[Any, ...]]] = {
    **{getattr(aten, name).default: (A,) for name in _ONE.split()},
    **{getattr(aten, name).Tensor: (A, B) for name in _TWO.split()},
    **{getattr(aten, name).Scalar: (A, 0.5) for name in _TWO.split()},
    **{getattr(aten, name).default: (B,) for name in ("log", "rsqrt", "sqrt")},
    aten.adaptive_avg_pool2d.default: (IMAGE, [3, 2]),
    aten.add_.Tensor: (A, B),
    aten.addmm.default: (V4, A[0], M44),
    aten.argmax.default: (A, 1, True),
    aten.avg_pool2d.default: (IMAGE, [2, 3], [2, 2], [1, 1], True),
    aten.baddbmm.default: (A, A[..., :3], B),
    aten.batch_norm.default: (IMAGE, V4, V4, V4, V4, True, 0.2, 1e-3, False),
    aten.bitwise_and.Tensor: (TRUE, ~TRUE),
    aten.bmm.default: (A, B.transpose(1, 2)),
    aten.cat.default: ([A, B], 1),
    aten.chunk.default: (A, 2, 2),
    aten.clamp.default: (A, -1, 0.5),
    aten.conv1d.default: (A, B, V4[:2], [2], [1]),
    aten.conv2d.default: (IMAGE, IMAGE[..., :3, :2], V4[:2], [2, 1], [1, 0]),
    aten.conv3d.default: (IMAGE[None], IMAGE[None, :, :2, :2, :2]),
    aten.cumsum.default: (A, 1),
    aten.div.Tensor: (A, B),
    aten.dropout.default: (A, 0.5, True),
    aten.dropout_.default: (A, 0.5, True),
    aten.embedding.default: (M44, INDEX, 1),
    aten.feature_dropout.default: (IMAGE, 0.5, True),
    aten.flatten.using_ints: (A, 1, 2),
    aten.gather.default: (M44, 1, INDEX),
    aten.group_norm.default: (IMAGE, 2, V4, V4, 1e-3),
    aten.index_select.default: (A, 2, INDEX[0]),
    aten.layer_norm.default: (A, [4], V4, V4, 1e-3, False),
    aten.linear.default: (A, M44, V4),
    aten.log_softmax.int: (A, 1),
    aten.masked_fill.Scalar: (A, TRUE, -9.0),
    aten.masked_fill.Tensor: (A, TRUE, torch.tensor(-9.0)),
    aten.matmul.default: (A, M44),
    aten.max_pool2d.default: (IMAGE, [3, 2], [2, 1], [1, 0]),
    aten.mean.dim: (A, [0, 2], True),
    aten.mm.default: (M44, M44),
    aten.mul_.Tensor: (A, B),
    aten.narrow.default: (A, 2, 1, 2),
    aten.pow.Scalar: (2.0, A),
    aten.pow.Tensor_Scalar: (A, 3.0),
    aten.pow.Tensor_Tensor: (B, A),
    aten.rms_norm.default: (A, [4], V4, 1e-3),
    aten.rsub.Scalar: (A, 1.0),
    aten.scaled_dot_product_attention.default: (A, B, A, A[0, :, :3] > 0, 0.0),
    aten.select.int: (A, 2, 1),
    aten.softmax.int: (A, 1),
    aten.split.Tensor: (A, 3, 2),
    aten.split_with_sizes.default: (A, [1, 3], 2),
    aten.squeeze.dim: (A[:, :1], 1),
    aten.stack.default: ([A, B], 2),
    aten.sum.dim_IntList: (A, [0, 2], True),
    aten.t.default: (M44,),
    aten.transpose.int: (A, 0, 2),
    aten.unbind.int: (A, 2),
    aten.unsqueeze.default: (A, -1),
    aten.where.self: (TRUE, A, B),
}
# Those that become methods or subscripts, with arguments in all the forms they take.
REWRITTEN: Final[tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]] = (
    (aten.view.default, (A, [6, -1]), {}),
    (aten.reshape.default, (A.transpose(0, 1), [6, -1]), {}),
    (aten.permute.default, (A, [2, 0, 1]), {}),
    (aten.expand.default, (A[:, :1], [-1, 5, -1]), {}),
    (aten.expand.default, (A[:, :1], [-1, 5, -1]), {"implicit": True}),
    (aten.contiguous.default, (A.transpose(0, 1),), {}),
    (aten.contiguous.default, (IMAGE,), {"memory_format": torch.channels_last}),
    (aten.to.dtype, (A, torch.float64), {}),
    (aten.to.dtype, (A, torch.float64, False, True), {}),
    (aten.to.dtype_layout, (A,), {"dtype": torch.int64, "layout": torch.strided}),
    (aten.slice.Tensor, (A,), {}),
    (aten.slice.Tensor, (A, 0, 1), {}),
    (aten.slice.Tensor, (A, 2, -3, 9223372036854775807, 2), {}),
    (aten.slice.Tensor, (A, -1, 1, 3), {}),
    (aten.add_.Tensor, (A, B), {"alpha": 2}),
    (aten.gelu.default, (A,), {"approximate": "tanh"}),
    (aten.sum.dim_IntList, (A, [1]), {"dtype": torch.float64}),
    (aten.scaled_dot_product_attention.default, (A, B, A), {"is_causal": True}),
    (aten.scaled_dot_product_attention.default, (A, B, A), {"scale": 0.3}),
)


def both(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """What the operator returns and does to its arguments; the same by its binding."""
    graph = fx.Graph()
    nodes = pytree.tree_map_only(Tensor, lambda _: graph.placeholder("x"), args)
    for i, node in enumerate(x for x in pytree.tree_leaves(nodes) if _is_node(x)):
        node.target = f"x_{i}"
    graph.output(bindings.call(graph, target, nodes, kwargs))
    module = fx.GraphModule(torch.nn.Module(), graph)
    results = []
    for function in (lambda *x: target(*x, **kwargs), None):
        copies = pytree.tree_map_only(Tensor, torch.clone, args)
        tensors = [x for x in pytree.tree_leaves(copies) if isinstance(x, Tensor)]
        torch.manual_seed(3)
        out = module(*tensors) if function is None else function(*copies)
        results.append((out, tensors))
    return results[0], results[1]


def _is_node(x: object) -> bool:
    return isinstance(x, fx.Node)


def assert_same(expected: Any, got: Any) -> None:
    """Equal bits, types, shapes and strides."""
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True)
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(a, b)


def test_every_binding_is_tried() -> None:
    """A row without arguments here would be a claim without a test."""
    assert set(ARGUMENTS) == set(bindings.FUNCTIONS)


@pytest.mark.parametrize("target", ARGUMENTS, ids=str)
def test_a_binding_is_its_operator(target: Any) -> None:
    """Same arguments, same bits; in-place ones change the same argument."""
    expected, got = both(target, ARGUMENTS[target], {})

    assert_same(expected, got)


@pytest.mark.parametrize(("target", "args", "kwargs"), REWRITTEN)
def test_a_rewritten_call_is_its_operator(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Sizes one by one, `x[:, a:b]` for a slice, keywords."""
    expected, got = both(target, args, kwargs)

    assert_same(expected, got)


def test_an_unknown_operator_stays_as_it_is() -> None:
    """What is in no table is called as torch.export wrote it."""
    graph = fx.Graph()

    node = bindings.call(graph, operator.neg, (graph.placeholder("x"),), {})

    assert node.target is operator.neg


def test_a_batch_norm_needs_two_values_per_channel() -> None:
    """Else its running variance would be NaN; torch's check is not in the graph."""
    settings = (None, None, torch.zeros(3), torch.ones(3))
    for shape, training in (((1, 3), False), ((2, 3), True), ((1, 3, 2), True)):
        found = bindings.batch_norm(
            torch.ones(shape), *settings, training, 0.1, 1e-5, False
        )
        assert found.isfinite().all()
    with pytest.raises(DataError, match=r"shape \(1, 3\).*at least 2 samples"):
        bindings.batch_norm(torch.ones(1, 3), *settings, True, 0.1, 1e-5, False)
    assert all(x.isfinite().all() for x in settings if x is not None)
