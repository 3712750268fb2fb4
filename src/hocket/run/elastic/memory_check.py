"""Refuses what will not fit the memory, before the first step.

any policy                checks the first layout
Listed({2: 6, 4: 0})      also checks 6 and then 0 frozen layers: an allowed shape fits
"""

from __future__ import annotations

from collections.abc import Sequence

from hocket.errors import FitError
from hocket.freeze.policy import LayerObservation, Listed
from hocket.freeze.shapes import Prediction
from hocket.run.elastic.shape_choice import (
    FreezingOptions,
    Present,
    ShapeChoice,
    shape_of,
)
from hocket.run.engine.executor import PlayedLayout


def refuse_unfit(
    options: FreezingOptions, choice: ShapeChoice, first: PlayedLayout, num_layers: int
) -> None:
    """Refuse a first layout, or listed numbers of frozen layers, that do not fit.

    Args:
        options: the user's.
        choice: chooses the shapes.
        first: what is played at first.
        num_layers: layers that may freeze.

    Raises:
        FitError: the first layout does not fit, or no allowed shape fits a listed
            number of frozen layers.
        ConfigError: the list lets layers train again, and then no allowed shape fits.
        ShapeError: there are fewer layers than stages.
    """
    if options.memory_bytes is None:
        return
    present = Present(shape_of(first), first.plan.boundaries, 0)
    _refuse_first(first, choice.possible(0, present), options.memory_bytes)
    policy = options.policy
    if not isinstance(policy, Listed):  # only a list is known in advance
        return
    # The first decision chooses a shape, too, even if the list does not name it.
    for number in sorted({1, *policy.num_frozen}):
        seen = LayerObservation(number, 0, num_layers, present.num_frozen)
        wanted = policy.decide(None, seen)
        num_frozen, found = choice.with_most_frozen(wanted, present)
        present = Present(found.shape, found.boundaries, num_frozen)


def _refuse_first(
    first: PlayedLayout, possible: Sequence[Prediction], memory_bytes: int
) -> None:
    """Refuse a layout that needs more than the memory, as planned or as predicted.

    The first decision compares predictions, which are a few bytes off the plan.
    """
    shape, planned = shape_of(first), first.plan.predicted
    needs = [(round(planned.peak_bytes(d)), d) for d in range(shape.num_stages)]
    needs += [(x.peak_bytes, x.fullest) for x in possible if x.shape == shape]
    needed_bytes, device = max(needs)
    if needed_bytes <= memory_bytes:
        return
    others = [x for x in possible if x.shape != shape and x.peak_bytes <= memory_bytes]
    way_out = (
        "no other shape fits; give more memory_bytes, more workers, or more "
        "microbatches, which are smaller"
    )
    if others:
        least = min(others, key=lambda x: x.peak_bytes)
        num_replicas = least.shape.num_replicas
        num_parts = first.plan.schedule.program.nets[0].num_microbatches
        way_out = (
            f"begin with {least.shape}, which needs the least, {least.peak_bytes} "
            f"bytes: num_replicas={num_replicas}, num_microbatches="
            f"{num_parts * shape.num_replicas // num_replicas}"
        )
    raise FitError(
        f"the first layout, {shape} (stages x replicas), needs {needed_bytes} bytes on "
        f"device {device}, and memory_bytes is {memory_bytes}: {way_out}",
        device=device,
        needed_bytes=needed_bytes,
        memory_bytes=memory_bytes,
    )
