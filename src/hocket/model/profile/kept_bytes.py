"""Finds what the forward of each piece of a model keeps for its backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hocket.model.profile.passes import Given, detached
from hocket.model.stages.discard_saved_tensors import refuse
from hocket.model.stages.stage import StageModule


@dataclass(slots=True)
class KeptBytes:
    """The bytes that a forward keeps for its backward.

    Args:
        made_bytes: kept tensors that the forward made.
        input_bytes: kept inputs.
    """

    made_bytes: int = 0
    input_bytes: int = 0


def kept_bytes(
    pieces: Sequence[StageModule], given: Given, resident: Sequence[Tensor]
) -> tuple[list[KeptBytes], Given]:
    """Measure the bytes that each layer's forward keeps for its backward.

    Each storage is counted once, for the first layer that keeps it. Of a layer whose
    forward runs a backward of its own nothing is counted: torch.func takes no hooks.

    Args:
        pieces: the layers, in order.
        given: what the first piece and the loss read.
        resident: tensors that are in memory anyway, such as weights; not counted.

    Returns:
        Each layer's bytes; and what the next layer reads, on the CPU.
    """
    before = [
        x for x, is_kept in zip(given.received, given.kept, strict=True) if is_kept
    ]
    seen = {x.untyped_storage().data_ptr() for x in (*resident, *before)}
    kept: list[KeptBytes] = []
    alive: list[Any] = []  # so that no address is used twice
    received: Sequence[Tensor] = given.received
    for piece in pieces:
        received = detached(received, piece)
        from_before = {x.untyped_storage().data_ptr() for x in received}
        found = KeptBytes()
        watched = _found_in(found, seen, from_before, alive)
        with nullcontext() if piece.runs_backward else watched:
            out = piece(*received, *(given.inputs[i] for i in piece.batch_inputs))
            if piece is pieces[-1] and given.finish is not None:
                out = (given.finish(out),)
        kept.append(found)
        alive += [received, out]
        received = out
    alive.clear()  # the graph keeps `pack`, which keeps this list: break the cycle
    were_kept = [x.untyped_storage().data_ptr() in seen for x in received]
    sent = [x.detach().cpu() for x in received]
    return kept, replace(given, received=sent, kept=were_kept)


@contextmanager
def _found_in(
    kept: KeptBytes, seen: set[int], from_before: set[int], alive: list[Any]
) -> Iterator[None]:
    """Record what autograd saves in the block and was not seen before.

    The graph keeps `pack`, and so `alive`: the caller must clear it, or the cycle is
    never freed.
    """

    def pack(tensor: Tensor) -> None:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in seen:
            seen.add(address)
            if address in from_before:
                kept.input_bytes += storage.nbytes()
            else:
                kept.made_bytes += storage.nbytes()

    with torch.autograd.graph.saved_tensors_hooks(pack, refuse):
        yield
