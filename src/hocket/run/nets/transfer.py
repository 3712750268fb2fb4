"""Sends parts of a net's state between workers, over torch.distributed.

A part is named tensors and a few numbers: a parameter, and what its optimizer keeps of
it. A description precedes each part, so that the receiver need not know its form:

    move 3, from 0 to 2     the description's length ▶ the description ▶ each tensor

All workers make the moves in one order. Sends do not wait for their receivers, so no
two workers wait for each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.errors import WaitError
from hocket.run.nets.moves import Move


@dataclass(frozen=True, slots=True)
class Bundle:
    """One part of a net's state.

    Args:
        tensors: the tensors by kind; the parameter or buffer itself is `value`.
        facts: all else, as JSON holds it.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, Any] = field(default_factory=dict)


def transfer(
    moves: Sequence[Move],
    rank: int,
    bundle_of: Callable[[str, str], Bundle],
    device: torch.device,
) -> dict[tuple[str, str], Bundle]:
    """Make the moves. Every worker of the process group must call this.

    Args:
        moves: the moves, the same on all workers.
        rank: this worker's rank.
        bundle_of: returns a part that is here, by net and name.
        device: the device of this worker's tensors.

    Returns:
        The parts received, by (net, name).
    """
    received: dict[tuple[str, str], Bundle] = {}
    sends: list[tuple[Any, Tensor]] = []  # with what is under way
    for number, move in enumerate(moves):
        if rank == move.source:
            bundle = bundle_of(move.net, move.name)
            for target in move.targets:
                sends += send_bundle(bundle, target, number, device)
        elif rank in move.targets:
            received[move.net, move.name] = receive_bundle(move.source, number, device)
    finish(sends)
    return received


def finish(sends: Sequence[tuple[Any, Tensor]]) -> None:
    """Wait until bundles are sent.

    Raises:
        WaitError: a receiver is gone, or did not come.
    """
    with _peer_failure("a receiver of weights"):
        for work, _ in sends:
            work.wait()


def send_bundle(
    bundle: Bundle, target: int, tag: int, device: torch.device
) -> list[tuple[Any, Tensor]]:
    """Start to send a bundle; return what must be kept until it is sent.

    Args:
        bundle: the bundle.
        target: the rank of the receiver.
        tag: a number that the receiver gives, too.
        device: the device of this worker's tensors.
    """
    forms = {
        name: (str(x.dtype).removeprefix("torch."), list(x.shape), x.device.type)
        for name, x in bundle.tensors.items()
    }
    text = json.dumps({"tensors": forms, "facts": bundle.facts}).encode()
    message = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    tensors = [torch.tensor([len(text)], device=device), message]
    tensors += [x.detach().to(device).contiguous() for x in bundle.tensors.values()]
    with _peer_failure(f"rank {target}"):
        return [
            (dist.isend(_bytes(x), target, tag=tag), x) for x in tensors if x.numel()
        ]


def receive_bundle(source: int, tag: int, device: torch.device) -> Bundle:
    """Receive a bundle.

    Args:
        source: the rank of the sender.
        tag: the number that the sender gave.
        device: the device of this worker's tensors.

    Raises:
        WaitError: the sender is gone, or did not come.
    """
    with _peer_failure(f"rank {source}"):
        return _received(source, tag, device)


@contextmanager
def _peer_failure(who: str) -> Iterator[None]:
    """Return the error for a peer that did not send or receive."""
    try:
        yield
    except RuntimeError as error:
        raise WaitError(
            f"{who} is gone, or stuck, while layers move between workers ({error})"
        ) from error


def _received(source: int, tag: int, device: torch.device) -> Bundle:
    length = torch.empty(1, dtype=torch.int64, device=device)
    dist.recv(_bytes(length), source, tag=tag)
    message = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    dist.recv(message, source, tag=tag)
    described = json.loads(message.cpu().numpy().tobytes())
    tensors = {}
    for name, (dtype, shape, home) in described["tensors"].items():
        found = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        if found.numel():
            dist.recv(_bytes(found), source, tag=tag)
        # Optimizers keep some numbers on the host, whatever the parameter's device.
        tensors[name] = found.cpu() if home == "cpu" else found
    return Bundle(tensors, described["facts"])


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's memory as bytes: some backends lack some types."""
    return tensor.reshape(-1).view(torch.uint8)
