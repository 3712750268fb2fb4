"""Seconds of a captured step's regions on a GPU, counted from its operators.

A kernel takes as long as its multiplications at the share of the peak that GPUs reach,
or as reading and writing its tensors, and no less than a launch from within a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from hocket.core.costs import Costs, StageCost
from hocket.core.hardware import Hardware
from hocket.core.op import Kind
from hocket.run.outoforder.capture.captured_step import CapturedStep
from hocket.run.outoforder.capture.regions import RegionKey

GRAPH_S: Final = 1.5e-6  # between two kernels of a CUDA graph
_FLOAT: Final = 4  # bytes


@dataclass(frozen=True, slots=True)
class Counted:
    """A step on one GPU.

    Args:
        costs: each region's seconds, its kernels launched from a graph.
        num_kernels: of the whole step.
        kernels_s: the seconds of all kernels, without launches.
        launched_s: the same with each kernel launched by itself, as eager mode does,
            and the optimizer's for all weights at once.
    """

    costs: Costs
    num_kernels: int
    kernels_s: float
    launched_s: float


def count(step: CapturedStep, hardware: Hardware) -> Counted:
    """Count the kernels of a step in float32, and estimate their seconds."""
    of_region = {
        place: [*_kernels(nodes, hardware)]
        for place, nodes in step.regions.nodes.items()
    }
    for unit, update in step.updates.items():
        nodes = update.module.graph.nodes
        of_region[RegionKey(Kind.UPDATE, unit)] = [*_kernels(nodes, hardware)]
    each = [one for kernels in of_region.values() for one in kernels]

    def seconds(kind: Kind, unit: int) -> float:
        return sum(x + GRAPH_S for x in of_region.get(RegionKey(kind, unit), []))

    stages = tuple(
        StageCost(
            forward_s=seconds(Kind.FORWARD, unit),
            input_grad_s=seconds(Kind.BACKWARD_INPUT, unit),
            weight_grad_s=seconds(Kind.BACKWARD_WEIGHT, unit),
            update_s=seconds(Kind.UPDATE, unit),
        )
        for unit in range(step.regions.program.num_stages)
    )
    launched_s = _launched_s(of_region, hardware)
    return Counted(Costs(stages), len(each), sum(each), launched_s)


def _launched_s(
    of_region: Mapping[RegionKey, Sequence[float]], hardware: Hardware
) -> float:
    """Return the seconds of an eager step, which updates all weights together."""
    updates = [x for place, x in of_region.items() if place.kind is Kind.UPDATE]
    others = (x for place, x in of_region.items() if place.kind is not Kind.UPDATE)
    together_s = [sum(x) for x in zip_longest(*updates, fillvalue=0.0)]
    kernels = (*chain(*others), *together_s)
    return sum(max(x + GRAPH_S, hardware.op_s) for x in kernels)


def _kernels(nodes: Iterable[fx.Node], hardware: Hardware) -> Iterable[float]:
    """Yield the seconds of each operator that launches a kernel."""
    for node in nodes:
        if isinstance(node.target, torch._ops.OpOverload) and not _is_view(node.target):
            moved_s = _bytes(node) / hardware.reached_bytes_per_s
            yield max(moved_s, _flops(node) / hardware.reached_flops("float32"))


def _is_view(target: Any) -> bool:
    infos = [x.alias_info for x in target._schema.returns]
    return bool(infos) and all(x is not None and not x.is_write for x in infos)


def _values(tree: Any) -> Any:
    return pytree.tree_map_only(fx.Node, lambda x: x.meta.get("val"), tree)


def _bytes(node: fx.Node) -> int:
    every = pytree.tree_leaves(
        (_values((node.args, node.kwargs)), node.meta.get("val"))
    )
    return sum(x.numel() * x.element_size() for x in every if isinstance(x, Tensor))


def _flops(node: fx.Node) -> int:
    assert isinstance(node.target, torch._ops.OpOverload), "it launches a kernel"
    formula = flop_registry.get(node.target.overloadpacket)
    if formula is None:
        return 0
    args, kwargs = _values((node.args, node.kwargs))
    return int(formula(*args, **kwargs, out_val=node.meta.get("val")))
