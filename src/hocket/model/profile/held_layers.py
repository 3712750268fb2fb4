"""Measures a model of which one layer at a time has its weights.

    hold a ─▶ measure a ─▶ hold b ─▶ measure b ─▶ c does what b does: its profile is b's

What the first of a kind sends stands for what the others do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from hocket.model.capture.capture import Captured
from hocket.model.profile.measure import LayerGroup, restored_model
from hocket.model.profile.passes import Finish, Given, sum_of_outputs
from hocket.model.profile.profile import LayerProfile, Profile, conditions_of
from hocket.model.stages.cut import names_in_stages
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
