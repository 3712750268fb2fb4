"""DualPipeV: forwards and backwards in pairs, on stages in a V."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hocket.core.costs import StageCost
from hocket.core.op import Kind
from hocket.core.schedule import Schedule
from hocket.core.step_end import repeat_step
from hocket.errors import ShapeError
from hocket.schedules.entry import Entry, Shape
from hocket.schedules.v_shape import (
    STAGES_PER_DEVICE,
    Move,
    numbered,
    stages_of,
    v_chain,
)


def dualpipe_v(shape: Shape) -> Schedule:
    """Pair each forward with a backward, so that either's messages hide in the other.

    The stages lie in a V. In the main part each device alternates a forward of one of
    its stages and a whole backward of the other; backwards are split only where the
    pipeline fills and drains. Runtimes that overlap a pair's compute gain by it; here
    a pair is two ops, one after the other.

    Bubble per step: `(p - 1) * (F + I - W) / 2` if `W <= I <= F <= I + W`. The authors'
    `(PP / 2 - 1) * (F&B + B - 3W)`, with `PP = 2p` stages and their times, is for pairs
    that end together, `F&B` after they began: without any overlap `I / 2` more per hop
    than here, where a forward's output leaves before its partner ends. Every device
    holds `p + 1/2` units.

    >>> print(dualpipe_v(Shape(2, num_microbatches=4, stages_per_device=2)))
    d0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3 3U 0U
    d1  1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3 2U 1U

    Source: DeepSeek-AI, arXiv:2412.19437, and the repository deepseek-ai/DualPipe;
    torch's `ScheduleDualPipeV`.

    Raises:
        ShapeError: not two stages per device, or fewer microbatches than stages.
    """  # noqa: E501  (the picture)
    program = v_chain("dualpipe-v", shape)
    if shape.num_microbatches < shape.num_stages:
        raise ShapeError(
            f"dualpipe-v needs as many microbatches as stages, got num_microbatches="
            f"{shape.num_microbatches} for num_devices={shape.num_devices}: use "
            f"{shape.num_stages} or more"
        )
    return repeat_step(
        program, lambda device: numbered(_moves(shape, device), shape.num_microbatches)
    )


def _moves(shape: Shape, device: int) -> Iterator[Move]:
    """Yield a device's moves; the steps are those of the authors' repository."""
    num_before, num_after = device + 1, shape.num_devices - 1 - device
    num_main = shape.num_microbatches - shape.num_stages + num_before
    down, up = stages_of(shape, device)
    f0, b0, i0, w0 = ((kind, down) for kind in _KINDS)
    f1, b1, i1, w1 = ((kind, up) for kind in _KINDS)
    yield from [f0] * (2 * num_after)  # 1. F0
    yield from [f0, f1] * num_before  # 2. F0 F1
    yield from [i1, w1, f1] * num_after  # 3. I1 W1 F1
    yield from [f0, b1, f1, b0] * num_main  # 4. F0 B1, F1 B0
    yield from [b1, f1, b0] * num_after  # 5. B1, F1 B0
    # 6. B1 B0, whole in the first half of this step and split in the second
    yield from ([b1, b0] * num_before)[:num_before]
    split = [i1, i0] * num_before
    yield from split[num_before:]
    # 7. W I0, and 8. W: each is the oldest that is left
    weights = [w1 if move is i1 else w0 for move in split[num_before:]]
    weights += [w0] * num_after
    for weight in weights[:num_after]:
        yield weight
        yield i0
    yield from weights[num_after:]


_KINDS: Final = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def _holds_for(shape: Shape, share: StageCost) -> bool:
    return share.weight_grad_s <= share.input_grad_s <= share.forward_s


def _bubble_s(shape: Shape, share: StageCost) -> float:
    late_s = share.forward_s - share.weight_grad_s
    part_s = late_s + max(share.input_grad_s, late_s)
    return shape.num_steps * (shape.num_devices - 1) * part_s / STAGES_PER_DEVICE


def _peak_activations(shape: Shape, device: int) -> float:
    return shape.num_devices + 1 / 2


ENTRY: Final = Entry(
    dualpipe_v,
    _bubble_s,
    _peak_activations,
    stages_per_device=STAGES_PER_DEVICE,
    holds_for=_holds_for,
)
