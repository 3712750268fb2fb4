"""Measures the forwards of a net that has no backwards, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor

from hocket.model.capture.captured import Captured
from hocket.model.profile.allocations import allocations
from hocket.model.profile.clock import clock_of
from hocket.model.profile.measure import restored_model
from hocket.model.profile.passes import CallSpan, timed
from hocket.model.profile.profile import LayerProfile, Profile, conditions_of
from hocket.model.stages.cut import cut

_NUM_WARM: Final = 2
_MIN_PASSES: Final = 7
_BUDGET_S: Final = 1.0  # for the passes of all layers


def passes_of(*, training: bool) -> str:
    """Return how a kept profile of forwards names its passes."""
    return "forward" if training else "forward in eval mode"


def profile_forwards(
    captured: Captured, leaves: Sequence[Any], *, device: torch.device, training: bool
) -> Profile:
    """Measure the forward of every layer, without gradients; medians of some passes.

    One layer at a time is on the device. The model, its weights, buffers and modes, and
    random state are restored.

    Args:
        captured: the model.
        leaves: one microbatch on the device, flattened as `(args, kwargs)`.
        device: the device to run on.
        training: whether its modules run in training mode.

    Returns:
        A profile whose backwards take no time and keep nothing.

    Raises:
        torch.OutOfMemoryError: a layer does not fit by itself.
    """
    pieces = cut(captured, range(1, len(captured.layers)))
    budget_s = _BUDGET_S / len(pieces)
    clock = clock_of(device)
    columns: list[list[float]] = []

    def run(span: CallSpan, budget_s: float) -> None:
        """Run the pieces one after the other, each in a span, as often as it may."""
        received: Sequence[Tensor] = ()
        for piece in pieces:
            piece.to(device).train(training)
            own = [*received, *(leaves[i] for i in piece.batch_inputs)]
            until_s, num = perf_counter() + budget_s, 0
            columns.append([])
            while num < 1 or (
                budget_s and (num < _MIN_PASSES or perf_counter() < until_s)
            ):
                with span():
                    received = piece(*own)
                num += 1
            piece.cpu()

    with restored_model(captured, device), torch.no_grad():
        run(lambda: timed(clock, columns[-1]), budget_s)
        with allocations(device) as log:
            run(log.span, 0.0)
    layers = zip(captured.layers, columns, log.peaks, strict=False)
    return Profile(
        tuple(
            LayerProfile(
                name=layer.name,
                forward_s=median(seconds[_NUM_WARM:]),
                input_grad_s=0.0,
                weight_grad_s=0.0,
                forward_spread_s=0.0,
                backward_spread_s=0.0,
                activation_bytes=peak,
                kept_input_bytes=0,
                received_bytes=sum(value.num_bytes for value in layer.received),
                received_grad_bytes=0,
                forward_work_bytes=peak,
            )
            for layer, seconds, peak in layers
        ),
        conditions_of(captured, device) | {"passes": passes_of(training=training)},
    )
