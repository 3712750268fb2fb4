"""Name what limits a candidate, in the word of its table's column.

| word | a step is long because of |
|---|---|
| work | nothing else: devices are idle for less than 5 % of it |
| bubble | warm-up and drain, or the order while the pipeline is full |
| messages, reduction, imbalance, host | what devices wait for most |
| memory | the memory: without recomputation, the same does not fit |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hocket.core.timelines.idle import Cause, idle_by_cause
from hocket.core.timelines.timeline import Timeline
from hocket.planner.candidate import Candidate, Outcome

WORK: Final = "work"
_BUBBLE: Final = "bubble"
_BUSY: Final = 0.05  # of a step: who is idle for less is limited by the work alone
_REDUCTION: Final = "reduction"
_WORDS: Final = {
    Cause.FILL: _BUBBLE,
    Cause.OTHER: _BUBBLE,
    Cause.REDUCTION: _REDUCTION,
}


def limit_of(outcome: Outcome, timeline: Callable[[Candidate], Timeline]) -> str:
    """Return what limits an outcome, besides memory.

    Args:
        outcome: one that fits.
        timeline: simulates a candidate.
    """
    if outcome.bubble_fraction < _BUSY:
        return WORK
    if outcome.candidate.is_data_parallel:  # its devices wait for nothing else
        return _REDUCTION
    seconds = dict(idle_by_cause(timeline(outcome.candidate)).seconds)
    if outcome.delay:  # its timeline begins with a pipeline that is empty
        del seconds[Cause.FILL]
    words: dict[str, float] = {}
    for cause, idle_s in seconds.items():
        word = _WORDS.get(cause, cause.value)
        words[word] = words.get(word, 0.0) + idle_s
    return max(words, key=words.__getitem__)
