"""Interleaved 1F1B: several stages per device, and so a shorter way to fill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from hocket.core.op import Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.step_end import repeat_step
from hocket.errors import ShapeError
from hocket.schedules.entry import Entry, Shape
from hocket.schedules.looped_bfs import looped_bubble_s
from hocket.schedules.one_f_one_b import alternate

_NAME: Final = "interleaved-1f1b"


def interleaved_1f1b(shape: Shape) -> Schedule:
    """Run 1F1B with several stages per device, for a `v` times smaller bubble.

    Stage `s` lives on device `s % p`. Microbatches go in rounds of `r`: a round passes
    a device's first stage, then its second, and so on, and backwards in reverse. Each
    device pairs forwards and backwards of that long sequence as 1F1B does.

    Bubble per step: `(p - 1) * (F + B) / v`, if `m >= p`; with fewer microbatches each
    further stage waits for `p - m` more. Device `d` holds `(w + 1) / v` units, where
    `w = (v - 1) * r + 2 * (p - 1 - d)` is its warm-up, and never more than `m`.

    >>> print(interleaved_1f1b(Shape(2, num_microbatches=4, stages_per_device=2)))
    d0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3 2U 0U
    d1  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 3U 1U

    There are `max(1, m // p)` rounds, and `m` must be a multiple of their number, so
    that all are equally long: any `m` up to `p`, any multiple of `p`, and numbers like
    10 on 4 devices, two rounds of 5. This is torch's generalisation of Megatron-LM's
    `m % p == 0`.

    Source: Narayanan et al., arXiv:2104.04473, section 2.2.2 and Fig. 4, bottom;
    torch's `ScheduleInterleaved1F1B`.

    Raises:
        ShapeError: the microbatches make no equal rounds.
    """
    rounds = equal_rounds(_NAME, shape)
    return repeat_step(
        shape.chain(),
        lambda device: interleaved(shape, rounds, device, Kind.BACKWARD, lead=2),
    )


def interleaved(
    shape: Shape, rounds: Sequence[range], device: int, backward: Kind, *, lead: int
) -> Iterator[Op]:
    """Alternate a device's forwards and backwards, round by round.

    Args:
        shape: the shape.
        rounds: the microbatches of each round.
        device: the device.
        backward: B or I.
        lead: by how many forwards the warm-ups of neighbours differ.
    """
    stages = range(device, shape.num_stages, shape.num_devices)
    return alternate(
        [Op(Kind.FORWARD, s, i) for r in rounds for s in stages for i in r],
        [Op(backward, s, i) for r in rounds for s in stages[::-1] for i in r],
        num_warmup=num_warmup(shape, rounds, device, lead=lead),
    )


def num_warmup(shape: Shape, rounds: Sequence[range], device: int, *, lead: int) -> int:
    """Return the forwards of a device before its first backward."""
    num_first = (shape.stages_per_device - 1) * len(rounds[0])
    return num_first + lead * (shape.num_devices - 1 - device)


def peak_activations(name: str, lead: int) -> Callable[[Shape, int], float]:
    """Return the function of the activation units that a device holds."""

    def peak(shape: Shape, device: int) -> float:
        num_ahead = num_warmup(shape, equal_rounds(name, shape), device, lead=lead)
        v = shape.stages_per_device
        return min(num_ahead + 1, v * shape.num_microbatches) / v

    return peak


def equal_rounds(name: str, shape: Shape) -> list[range]:
    """Return the microbatches of each round, all equally many.

    Args:
        name: the schedule's name, for the error.
        shape: its numbers.

    Raises:
        ShapeError: they make no equal rounds.
    """
    p, m = shape.num_devices, shape.num_microbatches
    if not _fits(p, m):
        below = next(i for i in range(m, 0, -1) if _fits(p, i))
        above = next(i for i in range(m, m + p + 1) if _fits(p, i))
        raise ShapeError(
            f"{name} cannot cut num_microbatches={m} into {m // p} equal "
            f"rounds for num_devices={p}: use {below} or {above} microbatches, or any "
            f"multiple of {p}"
        )
    length = m // max(1, m // p)
    return [range(begin, begin + length) for begin in range(0, m, length)]


def _fits(num_devices: int, num_microbatches: int) -> bool:
    return num_microbatches % max(1, num_microbatches // num_devices) == 0


def _num_buffers(shape: Shape) -> int:
    """Return how many microbatches pile up where a round is longer than `p`."""
    rounds = equal_rounds(_NAME, shape)
    if len(rounds) == 1 or shape.num_devices == 1 or shape.stages_per_device == 1:
        return 1
    return len(rounds[0]) - shape.num_devices + 1


ENTRY: Final = Entry(
    interleaved_1f1b,
    looped_bubble_s,
    peak_activations(_NAME, lead=2),
    _num_buffers,
    stages_per_device=2,
)
