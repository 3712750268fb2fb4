"""Prices Chimera: two copies of the model, in opposite directions.

    device    0    1    2    3
      down    0 ─▶ 1 ─▶ 2 ─▶ 3        half of the microbatches
        up    7 ◀─ 6 ◀─ 5 ◀─ 4        the other half

The order is not run, and no candidate. A plan prices it in a sentence, beside the
pipeline that it takes: on the same devices, with as many microbatches. The copies'
gradients are summed as a ring of two, or of all copies in all replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from hocket.core.simulate import simulate
from hocket.draw.quantity import byte_size, counted, seconds, short
from hocket.errors import ShapeError
from hocket.planner.candidate import Candidate, Outcome
from hocket.planner.predict import Predictor
from hocket.schedules import make_schedule

_NAME: Final = "chimera"


def chimera_sentence(predictor: Predictor, outcomes: Iterable[Outcome]) -> str:
    """Describe Chimera's cost; empty if it refuses the numbers, or nothing fits.

    Args:
        predictor: predicts for the model, on its devices.
        outcomes: the outcomes of all candidates.
    """
    fitting = (x for x in outcomes if x.fits and not x.delay)
    pipelines = (x for x in fitting if not x.candidate.is_data_parallel)
    rival = min(pipelines, key=lambda outcome: outcome.step_s, default=None)
    if rival is None:
        return ""
    try:
        step_s, peak_bytes = chimera_step(predictor, rival.candidate)
    except ShapeError:
        return ""
    p, m = rival.candidate.num_devices, rival.candidate.num_microbatches
    return (
        f"{_NAME}, which trains two copies of the model in opposite directions and is "
        f"not run here, would take a step of {seconds(step_s)} on {p} devices with "
        f"{counted(m, 'microbatch')}, {short(step_s / rival.step_s)} times that of "
        f"{rival.candidate.schedule}, and {byte_size(peak_bytes)} per device."
    )


def chimera_step(predictor: Predictor, like: Candidate) -> tuple[float, int]:
    """Return the seconds of a step, and the most bytes that a device holds.

    Args:
        predictor: predicts for the model, on its devices.
        like: the candidate whose devices, replicas and microbatches are used.

    Raises:
        ShapeError: an odd number of devices, or microbatches that make no whole rounds.
    """
    schedule = make_schedule(
        _NAME,
        num_devices=like.num_devices,
        num_microbatches=like.num_microbatches,
        num_replicas=like.num_replicas,
    )
    costs = predictor.costs(replace(like, stages_per_device=1))
    link = predictor.cluster.inside
    if like.num_replicas > 1:
        link = costs.reduce_link
    timeline = simulate(
        schedule, replace(costs, stages=costs.stages * 2, reduce_link=link)
    )
    peaks = map(timeline.peak_bytes, range(like.num_devices))
    return timeline.makespan_s, round(max(peaks))
