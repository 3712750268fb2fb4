"""Notes on a ranking: assumptions, and the price of Chimera beside it.

Chimera trains two copies of the model, in opposite directions:

    device    0    1    2    3
      down    0 ─▶ 1 ─▶ 2 ─▶ 3        half of the microbatches
        up    7 ◀─ 6 ◀─ 5 ◀─ 4        the other half

It is no candidate: a Pipeline trains one model without copies (`ProgramRun` runs
Chimera). It is priced on the devices of the fastest pipeline without shards, with as
many microbatches.
The copies' gradients are summed as a ring of two, or of all copies in all replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from hocket.core.simulate import simulate
from hocket.draw.quantity import byte_size, counted, seconds, short
from hocket.errors import ShapeError
from hocket.planner.candidate import Candidate, Outcome
from hocket.planner.predict import Predictor
from hocket.schedules import make_schedule
from hocket.schedules.v_min import repeating_bubble

CHIMERA: Final = "chimera"


def notes_on(predictor: Predictor, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the assumptions about the orders of a table, a sentence each, or none.

    Args:
        predictor: predicts for the model, on its devices.
        outcomes: the outcomes of its rows.
    """
    pipelines = [x.candidate for x in outcomes if not x.candidate.is_data_parallel]
    splits = sorted({x.schedule for x in pipelines if predictor.placement(x).splits})
    if splits and any(layer.split is None for layer in predictor.layers(1)):
        yield (
            f"Assumed of {', '.join(splits)}, which split a backward (B) into the "
            "gradient of the input (I) and that of the weights (W): activations are "
            "held until W is done, and W takes what is left of B without I."
        )
    if any(outcome.delay for outcome in outcomes):
        yield (
            "Orders with * do not drain the pipeline after a step: microbatches read "
            "weights that are `delay` updates old, and stages keep several versions "
            "(2 x 4: four stages keep two each). Their steps are those of a full "
            "pipeline. None is chosen unless its delay is allowed (--max-delay); "
            "hocket.emulate trains in one process exactly as they do."
        )
    yield from _repeating(predictor, outcomes)


def _repeating(predictor: Predictor, outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield that V-Min's best repeats its bubble, if times are not equal."""
    theirs = [x for x in outcomes if x.candidate.schedule == "v-min" and x.fits]
    if not theirs:
        return
    candidate = min(theirs, key=lambda outcome: outcome.step_s).candidate
    program = predictor.placement(candidate).schedule.program
    share = predictor.costs(candidate).mean_share(program)
    yield repeating_bubble(candidate.num_devices, share)


def chimera_sentence(predictor: Predictor, outcomes: Iterable[Outcome]) -> str:
    """Describe Chimera's cost; empty if it refuses the numbers, or nothing fits.

    Args:
        predictor: predicts for the model, on its devices.
        outcomes: the outcomes of all candidates.
    """
    fitting = (x for x in outcomes if x.fits and not x.delay)
    pipelines = (
        x
        for x in fitting
        if not x.candidate.is_data_parallel and x.candidate.num_shards == 1
    )
    rival = min(pipelines, key=lambda outcome: outcome.step_s, default=None)
    if rival is None:
        return ""
    try:
        step_s, peak_bytes = chimera_step(predictor, rival.candidate)
    except ShapeError:
        return ""
    p, m = rival.candidate.num_devices, rival.candidate.num_microbatches
    return (
        f"{CHIMERA}, which trains two copies of the model in opposite directions (with "
        f"ProgramRun), would take a step of {seconds(step_s)} on {p} devices with "
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
        CHIMERA,
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
    return timeline.makespan_s, round(timeline.most_bytes)
