"""Sends parts of a net's state between workers, over torch.distributed.

A part is named tensors and a few numbers: a parameter, and what its optimizer keeps of
it. All parts from one worker to another go together, behind a description of them, so
that the receiver need not know their form, and short tensors share a message:

    from 0 to 2     the description's length ▶ the description ▶ a.weight.value │ ...

With gloo, which sends no tensor of a GPU, they go by way of the host.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.errors import WaitError
from hocket.run.cluster.group import as_bytes
from hocket.run.cluster.world import World

_PACK_BYTES: Final = 4 << 20  # of a message of several tensors, which are copied


@dataclass(frozen=True, slots=True)
class Bundle:
    """One part of a net's state.

    Args:
        tensors: the tensors by kind; the parameter or buffer itself is `value`.
        facts: all else, as JSON holds it.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, Any] = field(default_factory=dict)


def finish(sends: Sequence[tuple[Any, Tensor]]) -> None:
    """Wait until bundles are sent.

    Raises:
        WaitError: a receiver is gone, or did not come.
    """
    with _peer_failure("a receiver of weights"):
        for work, _ in sends:
            work.wait()


def send_bundles(
    bundles: Sequence[Bundle], target: int, world: World
) -> list[tuple[Any, Tensor]]:
    """Start to send bundles; return what must be kept until they are sent.

    Args:
        bundles: the bundles.
        target: the rank of the receiver.
        world: the job.
    """
    carrier = world.carrier
    about = [
        {
            "tensors": {
                name: (str(x.dtype).removeprefix("torch."), [*x.shape], x.device.type)
                for name, x in bundle.tensors.items()
            },
            "facts": bundle.facts,
        }
        for bundle in bundles
    ]
    text = json.dumps(about).encode()
    message = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(carrier)
    messages = [as_bytes(torch.tensor([len(text)], device=carrier)), message]
    tensors = [
        as_bytes(x.to(carrier)) for bundle in bundles for x in bundle.tensors.values()
    ]
    for pack in _packs([x.numel() for x in tensors]):
        together = tensors[pack.start : pack.stop]
        messages.append(together[0] if len(together) == 1 else torch.cat(together))
    with _peer_failure(f"rank {target}"):
        return [(dist.isend(x, target), x) for x in messages if x.numel()]


def receive_bundles(source: int, world: World) -> list[Bundle]:
    """Receive bundles that were sent together.

    Args:
        source: the rank of the sender.
        world: the job; what does not live on the host comes to its device.

    Raises:
        WaitError: the sender is gone, or did not come.
    """
    with _peer_failure(f"rank {source}"):
        return _received(source, world)


@contextmanager
def _peer_failure(who: str) -> Iterator[None]:
    """Return the error for a peer that did not send or receive."""
    try:
        yield
    except RuntimeError as error:
        raise WaitError(
            f"{who} is gone, or stuck, while layers move between workers ({error})"
        ) from error


def _received(source: int, world: World) -> list[Bundle]:
    device = world.carrier
    length = torch.empty(1, dtype=torch.int64, device=device)
    dist.recv(as_bytes(length), source)
    message = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    dist.recv(message, source)
    about = json.loads(message.cpu().numpy().tobytes())
    forms = [form for one in about for form in one["tensors"].values()]
    found = [
        torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        for dtype, shape, _ in forms
    ]
    for pack in _packs([x.nbytes for x in found]):
        together = [as_bytes(x) for x in found[pack.start : pack.stop]]
        if len(together) == 1:
            _receive(together[0], source)
            continue
        sizes = [x.numel() for x in together]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        _receive(buffer, source)
        for x, part in zip(together, buffer.split(sizes), strict=True):
            x.copy_(part)
    # Optimizers keep some numbers on the host, whatever the parameter's device.
    placed = (
        x.to("cpu" if home == "cpu" else world.device)
        for x, (*_, home) in zip(found, forms, strict=True)
    )
    return [
        Bundle({name: next(placed) for name in one["tensors"]}, one["facts"])
        for one in about
    ]


def _receive(message: Tensor, source: int) -> None:
    if message.numel():
        dist.recv(message, source)


def _packs(sizes: Sequence[int]) -> Iterator[range]:
    """Yield consecutive tensors that go in one message.

    Args:
        sizes: their bytes.

    >>> [[*pack] for pack in _packs([3, 3 << 20, 2 << 20, 9 << 20, 5])]
    [[0, 1], [2], [3], [4]]
    """
    begin, total = 0, 0
    for end, size in enumerate(sizes):
        if end > begin and total + size > _PACK_BYTES:
            yield range(begin, end)
            begin, total = end, 0
        total += size
    if begin < len(sizes):
        yield range(begin, len(sizes))
