"""Which wave does what, and what waits for what.

sync="wave": batch `n` goes to wave `n % 2`, which has a copy of the model of its own.

    tick   F0 B0 ──── U0 F2 B2 ──── U2 ...     F(n) begins when F(n-1) has ended: one
             │  └──────┐   │  └──────┐         wave's activations grow while the
    tock     └─▶ F1 B1 U1  └─▶ F3 B3 U3        other's shrink
                                               U(n) reads the gradients of B(n), B(n-1)

sync="exact": the microbatches of each batch alternate between the waves, which have
one copy of the weights. One update reads the gradients of both.

    tick   F0 B0 F2 B2 U │ F0 ...
    tock      F1 B1 F3 B3│

Source: Wang et al., "Wavelet: Efficient DNN Training with Tick-Tock Scheduling"
(MLSys'21), figures 2 and 9. The paper starts tock half of a forward and backward later,
once; here each forward waits for the one before, so that the lag does not get lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from hocket.core.op import Kind, Op

SyncName: TypeAlias = Literal["wave", "exact"]
NUM_WAVES: Final = 2


@dataclass(frozen=True, slots=True)
class WaveOp:
    """One op, where it goes, and what it waits for beside its own lane.

    Args:
        op: the op, on stage 0: the whole model.
        lane: 0 for tick, 1 for tock.
        after: ops of the other lane, or of the step before, that must have ended.
    """

    op: Op
    lane: int
    after: tuple[Op, ...]


def ops_of_step(sync: SyncName, step: int, num_microbatches: int) -> Iterator[WaveOp]:
    """Yield the ops of one step in an order in which none waits for a later one.

    Args:
        sync: see above.
        step: the step's number, from 0; it trains one batch.
        num_microbatches: the parts of the batch, an even number if sync is "exact".
    """
    one_by_one = range(num_microbatches)
    if sync == "exact":
        for m in one_by_one:
            before = (_forward(step, m - 1),) if m else ()
            yield WaveOp(_forward(step, m), m % NUM_WAVES, before)
            if m:  # one later than its forward: the next forward is issued first
                yield WaveOp(_backward(step, m - 1), (m - 1) % NUM_WAVES, ())
        last = num_microbatches - 1
        yield WaveOp(_backward(step, last), last % NUM_WAVES, ())
        ends = tuple(_backward(step, last - wave) for wave in range(NUM_WAVES))
        yield WaveOp(_update(step), 0, ends)
        return
    lane = step % NUM_WAVES
    before = (_forward(step - 1, 0),) if step else ()
    for m in one_by_one:
        yield WaveOp(_forward(step, m), lane, () if m else before)
        yield WaveOp(_backward(step, m), lane, ())
    ends = (_backward(step - 1, num_microbatches - 1), _update(step - 1))
    yield WaveOp(_update(step), lane, ends if step else ())


def last_microbatch(sync: SyncName, lane: int, num_microbatches: int) -> int:
    """Return the last microbatch of a step in a lane."""
    last = num_microbatches - 1
    return last - (NUM_WAVES - 1 - lane) if sync == "exact" else last


def _forward(step: int, microbatch: int) -> Op:
    return Op(Kind.FORWARD, 0, microbatch, step)


def _backward(step: int, microbatch: int) -> Op:
    return Op(Kind.BACKWARD, 0, microbatch, step)


def _update(step: int) -> Op:
    return Op(Kind.UPDATE, 0, None, step)
