"""What one batch of `hocket.Waves` came to."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from hocket.errors import NonFiniteError
from hocket.run.data.loss import TOTAL
from hocket.sharing.waves.player import WaveStep


@dataclass(frozen=True, slots=True)
class WaveResult:
    """What one batch came to. Every worker gets the same numbers.

    Args:
        step: the batch's number, from 0 over the life of the run.
        wave: the wave whose weights were updated: 0 for tick, 1 for tock; 0 for both if
            sync is "exact".
        loss: what is trained, the mean over all samples of the batch.
        losses: every scalar that the loss function names, the means over all samples.
        num_samples: the samples of the batch, over all replicas.
        grad_norm: the norm of the gradients that the update read, before clipping.
        seconds: since the result before.
        skipped: whether nothing was updated, for gradients of float16 were too large.
    """

    step: int
    wave: int
    loss: float
    losses: dict[str, float]
    num_samples: int
    grad_norm: float
    seconds: float
    skipped: bool = False


def result_of(step: WaveStep, wave: int) -> WaveResult:
    """Return what a step came to, without its seconds.

    Args:
        step: one whose losses and norm are there.
        wave: the wave whose weights were updated.

    Raises:
        NonFiniteError: a loss or a gradient is not finite.
    """
    assert step.losses is not None
    assert step.norm is not None
    losses = dict(zip(step.names, step.losses.tolist(), strict=True))
    norm = float(step.norm)
    bad = [name for name, value in losses.items() if not isfinite(value)]
    if not step.is_skipped and (bad or not isfinite(norm)):
        what = f"the loss {bad[0]!r}" if bad else "a gradient"
        raise NonFiniteError(
            f"{what} of step {step.number} is not finite, and weights were updated "
            "from it before this was known: load the last checkpoint"
        )
    return WaveResult(
        step.number,
        wave,
        losses[TOTAL],
        losses,
        step.num_samples,
        norm,
        0.0,
        step.is_skipped,
    )
