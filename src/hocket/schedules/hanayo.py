"""Hanayo: stages in waves over the devices, V after V."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from hocket.core.costs import StageCost
from hocket.core.op import Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.step_end import repeat_step
from hocket.errors import ShapeError
from hocket.schedules.entry import Entry, Shape


def hanayo(shape: Shape) -> Schedule:
    """Send each microbatch up and down the devices, in as many waves as one likes.

    With `v` stages per device there are `v / 2` waves. Where a wave turns, two stages
    that follow each other are on one device, which sends itself nothing.

        stage   0 ┐         ┌ 7   8 ┐          ┌ 15      d0
                  1 ┐     ┌ 6       9 ┐      ┌ 14        d1
                    2 ┐ ┌ 5          10 ┐  ┌ 13          d2
                      3 4               11 12            d3

    Bubble per step: `2 * (p - 1) * max(F, B) / v` for one round of `p` microbatches,
    and `2 * (p - 1) * |B - F| / v` for each further one. Device `d` holds
    `p - (p - 1 - d) / v` units.

    >>> print(hanayo(Shape(2, num_microbatches=2, stages_per_device=2)))
    d0  0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1 3U 0U
    d1  1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 2U 1U

    Source: Liu et al., "Hanayo", arXiv:2308.15762 (SC'23), for the placement and its
    advantage. The order is ours: that of Chimera on twice the devices, folded in the
    middle; it was not compared with the authors' own.

    Raises:
        ShapeError: an odd number of stages per device, or microbatches that make no
            whole rounds.
    """
    v = shape.stages_per_device
    if v % 2:
        raise ShapeError(
            f"hanayo has two stages per wave on each device, got stages_per_device={v}:"
            f" use {_around(v, 2)}"
        )
    refuse_broken_rounds("hanayo", shape)
    p, m = shape.num_devices, shape.num_microbatches
    wave = [*range(p), *reversed(range(p))]
    program = shape.chain(wave * (v // 2))

    def order(device: int) -> Iterator[Op]:
        places = {stage: stage for stage in program.stages_on[device]}
        return wave_order(places, shape.num_stages, p, m)

    return repeat_step(program, order)


def wave_order(
    places: Mapping[int, int], num_places: int, per_round: int, num_microbatches: int
) -> Iterator[Op]:
    """Order a device's ops by slots, if each forward and each backward takes one slot.

    Microbatches enter every second slot. A device's stages are an odd number of slots
    apart, so one has the even slots and the other the odd ones; and the backwards of a
    round begin in the slot after its last forward.

    Args:
        places: the place of each of its stages on a microbatch's way, from 0.
        num_places: the number of places on that way.
        per_round: microbatches that may be under way together.
        num_microbatches: the microbatches of the net.
    """
    slots: dict[int, Op] = {}
    for i in range(num_microbatches):
        round_number, in_round = divmod(i, per_round)
        begin = 2 * num_places * round_number + 2 * in_round
        for stage, place in places.items():
            slots[begin + place] = Op(Kind.FORWARD, stage, i)
            slots[begin + 2 * num_places - 1 - place] = Op(Kind.BACKWARD, stage, i)
    return (slots[slot] for slot in sorted(slots))


def refuse_broken_rounds(name: str, shape: Shape) -> None:
    """Refuse microbatches that make no whole rounds.

    Raises:
        ShapeError: a round would not be full.
    """
    p, m = shape.num_devices, shape.num_microbatches
    if m % p:
        raise ShapeError(
            f"{name} takes whole rounds of num_devices={p} microbatches, got "
            f"num_microbatches={m}: use {_around(m, p)}"
        )


def _around(number: int, step: int) -> str:
    """Write the multiples next to a number that is none, as a choice."""
    below = number - number % step
    return f"{below} or {below + step}" if below else str(step)


def _bubble_s(shape: Shape, share: StageCost) -> float:
    num_hops = shape.num_devices - 1
    return wave_bubble_s(shape, share, num_hops) / shape.stages_per_device


def wave_bubble_s(shape: Shape, share: StageCost, num_hops: int) -> float:
    """Return the bubble of rounds in waves, over all steps, with one stage per share.

    What fills and drains is twice the longer of F and B for each hop, because forwards
    and backwards take turns; and each further round loses their difference twice.
    """
    backward_s = share.input_grad_s + share.weight_grad_s
    num_further = shape.num_microbatches // shape.num_devices - 1
    longer_s = max(share.forward_s, backward_s)
    uneven_s = abs(share.forward_s - backward_s)
    return shape.num_steps * 2 * num_hops * (longer_s + num_further * uneven_s)


def _peak_activations(shape: Shape, device: int) -> float:
    p, v = shape.num_devices, shape.stages_per_device
    return p - (p - 1 - device) / v


ENTRY: Final = Entry(hanayo, _bubble_s, _peak_activations, stages_per_device=2)
