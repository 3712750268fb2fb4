"""Compares models, settings and losses of all workers before the first step.

Models and settings are compared by digests. Losses are compared by value: every worker
computes them for the same random outputs, although only the worker of the last stage
computes them in training.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from hocket.errors import ModelError, SchemaError
from hocket.model.capture.captured import Captured
from hocket.model.trace.observe import TensorInfo
from hocket.run.cluster.world import World
from hocket.run.data.batch import digest, on_device
from hocket.run.data.loss import losses_of
from hocket.run.stage.loss_checks.reads import LossReads
from hocket.run.stage.loss_checks.trial import restored_attributes
from hocket.run.stage.seed import preserve_generators, seed_generators

log = logging.getLogger(__name__)

_REMEDY: Final = (
    "Weights are the same where every worker seeds before it makes the model, or loads "
    "the same checkpoint"
)
_NEAR: Final = 1e-5  # relative; hosts may round a loss differently


def refuse_differences(world: World, digests: Mapping[str, str]) -> None:
    """Refuse to start workers with different models or settings. Every worker calls.

    Args:
        world: the job.
        digests: the digests, by the name of what was hashed.

    Raises:
        SchemaError: two workers differ; names both, and what differs.
    """
    by_rank = world.gather_json(dict(digests), "compare")
    for what in digests:
        first = by_rank[0].get(what)
        for rank, part in enumerate(by_rank):
            if (other := part.get(what)) != first:
                raise SchemaError(
                    f"ranks 0 and {rank} differ in the {what} (digests "
                    f"{str(first)[:8]} and {str(other)[:8]}): make the pipeline from "
                    f"the same model, example and settings on every worker. {_REMEDY}"
                )


def refuse_different_weights(world: World, tensors: Mapping[str, Tensor]) -> None:
    """Refuse to start workers that hold other values of one tensor. Every worker calls.

    Args:
        world: the job.
        tensors: what this worker holds, by name.

    Raises:
        SchemaError: two workers differ; names both, and the tensor.
    """
    own = {name: digest(x) for name, x in sorted(tensors.items())}
    first: dict[str, tuple[int, int]] = {}
    for rank, part in enumerate(world.gather_json(own, "compare weights")):
        for name, found in part.items():
            other, known = first.setdefault(name, (rank, found))
            if found != known:
                raise SchemaError(
                    f"ranks {other} and {rank} have other values of {name}: give every "
                    f"worker the same files (weights=). {_REMEDY}"
                )


def refuse_different_losses(
    world: World, losses: Mapping[str, Mapping[str, float]]
) -> None:
    """Refuse to start workers whose loss functions differ. Every worker calls.

    Args:
        world: the job.
        losses: results of `losses_of_random_outputs`, by the name of the loss function.

    Raises:
        SchemaError: two workers differ; names both, the loss, and both values.
    """
    first, *others = world.gather_json(
        {what: dict(named) for what, named in losses.items()}, "compare losses"
    )
    for rank, other in enumerate(others, start=1):
        for what, named in first.items():
            theirs = other.get(what, {})
            for name in {**named, **theirs} if named and theirs else ():
                a, b = named.get(name), theirs.get(name)
                if not _is_same(a, b):
                    raise SchemaError(
                        f"ranks 0 and {rank} differ in the {what}: of the same outputs "
                        f"and the example's targets, {name!r} is {a} on rank 0 and {b} "
                        f"on rank {rank}. Use the same loss function, with the same "
                        "arguments, and the same example on every rank"
                    )


def _is_same(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return False
    return math.isclose(a, b, rel_tol=_NEAR) or (math.isnan(a) and math.isnan(b))


def losses_of_random_outputs(
    loss: Callable[..., Any],
    captured: Captured,
    targets: Any,
    others: Sequence[Any],
    device: torch.device,
) -> dict[str, float]:
    """Return the losses of random outputs between 0 and 1, the same on all workers.

    Args:
        loss: the user's loss function.
        captured: the model; outputs have the shapes of its example's.
        targets: the targets of its example.
        others: the outputs of other nets that the loss reads.
        device: where to compute.

    Returns:
        The losses by name; the class of the error if the loss raises one; empty if
        a second call returns other losses.
    """

    def once() -> dict[str, float]:
        seed_generators(device, 0)
        try:
            given = _random_outputs(captured), targets, *others
            named = losses_of(loss, *on_device(given, device))
            return {name: value.item() for name, value in named.items()}
        except Exception as error:
            return {type(error).__name__: 0.0}

    with preserve_generators(device), restored_attributes(loss):
        found = once()
        return found if repr(found) == repr(once()) else {}


def refuse_reads(
    reads: LossReads,
    loss: Callable[..., Any],
    captured: Captured,
    targets: Any,
    others: Sequence[Any],
    device: torch.device,
) -> None:
    """Refuse a loss by what it reads of the model, if it runs on random outputs.

    Args:
        reads: looks at the loss.
        loss: the user's loss function.
        captured: the model.
        targets: the targets of its example.
        others: the outputs of other nets that the loss reads.
        device: where to compute.

    Raises:
        ModelError: it reads what the worker of the last stage does not have.
    """
    with preserve_generators(device), restored_attributes(loss):
        given = on_device((_random_outputs(captured), targets, *others), device)
        try:
            reads.losses(losses_of, loss, *given)
        except ModelError:
            raise
        except Exception as error:
            log.debug("the loss does not run on random outputs: %s", error)


def _random_outputs(captured: Captured) -> Any:
    """Return outputs of the captured model's structure, the same in each call."""
    trace, facts = captured.training.trace, captured.training.facts
    rng = torch.Generator().manual_seed(0)

    def tensor(info: TensorInfo) -> Tensor:
        value = torch.rand(info.shape, generator=rng).to(info.dtype)
        return value.requires_grad_(info.requires_grad).clone()

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        if leaf in trace.leaf_of:
            return captured.example.leaves[trace.leaf_of[leaf]]
        return pytree.tree_map_only(TensorInfo, tensor, facts[leaf].structure)

    leaves: Any = trace.output.args[0]
    return pytree.tree_unflatten([made(leaf) for leaf in leaves], trace.out_spec)
