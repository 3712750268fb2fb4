"""Measures a model of which one layer at a time has its weights.

    hold a ─▶ measure a ─▶ hold b ─▶ measure b ─▶ c does what b does: its profile is b's

What the first of a kind sends stands for what the others do.

A net that has no backwards is measured by its forwards alone, a layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from hocket.model.capture.capture import Captured
from hocket.model.profile.allocations import allocations
from hocket.model.profile.measure import LayerGroup, restored_model
from hocket.model.profile.passes import Finish, Given, sum_of_outputs
from hocket.model.profile.precision import timed_rounds
from hocket.model.profile.profile import LayerProfile, Profile, conditions_of
from hocket.model.stages.cut import cut, names_in_stages
from hocket.model.stages.splitter import MakeSplitter

_Form = tuple[torch.Size, torch.dtype]  # of a tensor that a layer receives


def profile_held(
    captured: Captured,
    leaves: Sequence[Any],
    *,
    device: torch.device,
    make_splitter: MakeSplitter,
    hold: Callable[[Collection[str]], None],
    finish: Finish | None = None,
    targets: Any = None,
) -> Profile:
    """Measure layers one after the other, and of those that do the same work one.

    Args:
        captured: the model.
        leaves: one microbatch on the device, flattened as `(args, kwargs)`.
        device: the device to run on.
        make_splitter: makes the splitter of a piece, as in training.
        hold: gives values to tensors, by first name, and takes those of others.
        finish: see `profile`.
        targets: see `profile`.

    Raises:
        torch.OutOfMemoryError: a layer does not fit by itself.
    """
    num_layers, alike = len(captured.layers), captured.alike
    names = names_in_stages(captured, range(1, num_layers))
    given = Given(leaves, sum_of_outputs if finish is None else finish)
    finish, found = given.finish, list[LayerProfile]()
    known: dict[tuple[int, tuple[_Form, ...]], tuple[LayerProfile, Given]] = {}
    for i, layer in enumerate(captured.layers):
        kind = alike[i], tuple((x.shape, x.dtype) for x in given.received)
        is_last = i + 1 == num_layers  # the loss is a part of it
        if is_last or kind not in known:
            hold(names[i])
            share = 1 / len(set(alike))
            group = LayerGroup(
                captured, i, i + 1, device, make_splitter, targets, share
            )
            with restored_model(captured, device, names=names[i]):
                (measured,), sent = group.measure(given)
            known[kind] = measured, sent
        measured, sent = known[kind]
        found.append(replace(measured, name=layer.name))
        given = replace(sent, finish=finish)
    hold(())
    return Profile(tuple(found), conditions_of(captured, device))


_NUM_WARM: Final = 2
_MIN_PASSES: Final = 7  # those that warm up included
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
    columns: list[list[float]] = [[] for _ in pieces]

    def run(spans: Iterable[Iterable[AbstractContextManager[None]]]) -> None:
        """Run the pieces one after the other, each in its spans."""
        received: Sequence[Tensor] = ()
        for piece, own_spans in zip(pieces, spans, strict=True):
            piece.to(device).train(training)
            own = [*received, *(leaves[i] for i in piece.batch_inputs)]
            for span in own_spans:
                with span:
                    received = piece(*own)
            piece.cpu()

    least = _MIN_PASSES - _NUM_WARM
    with restored_model(captured, device), torch.no_grad():
        run(timed_rounds(x, device, least, _NUM_WARM, budget_s) for x in columns)
        with allocations(device) as log:
            run([log.span()] for _ in pieces)
    layers = zip(captured.layers, columns, log.peaks, strict=False)
    return Profile(
        tuple(
            LayerProfile(
                name=layer.name,
                forward_s=median(seconds),
                input_grad_s=0.0,
                weight_grad_s=0.0,
                activation_bytes=peak,
                received_bytes=sum(value.num_bytes for value in layer.received),
                forward_work_bytes=peak,
            )
            for layer, seconds, peak in layers
        ),
        conditions_of(captured, device) | {"passes": passes_of(training=training)},
    )
