"""Warns users of V-Min or V-Half if measured times make the bubble repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final
from warnings import warn

from hocket.core.costs import StageCost
from hocket.run.engine.plan import Plan
from hocket.schedules.v_min import (
    RepeatingBubbleWarning,
    repeating_bubble,
    repeating_bubble_of_v_half,
)

_TEXTS: Final[Mapping[object, Callable[[int, StageCost], str]]] = {
    "v-min": repeating_bubble,
    "v-half": repeating_bubble_of_v_half,
}


def warn_of_repeating_bubble(schedule: object, plan: Plan) -> None:
    """Warn if a schedule waits in every microbatch, with the numbers.

    Args:
        schedule: the user's choice of schedule.
        plan: what will run, with its costs.

    Warns:
        RepeatingBubbleWarning: the bubble repeats.
    """
    if schedule not in _TEXTS:
        return
    program = plan.schedule.program
    text = _TEXTS[schedule](program.num_devices, plan.costs.mean_share(program))
    if text:
        warn(text, RepeatingBubbleWarning, stacklevel=2)
