"""Notes on a ranking: what is assumed about the orders of its table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hocket.planner.candidate import Outcome
from hocket.planner.predict import Predictor
from hocket.schedules.v_min import repeating_bubble


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
