"""When to freeze layers, and the shapes that a shorter pipeline goes through.

Imports `errors` and `planner`, and no torch. Begin with `policy.py`, what a policy is,
and those that measure nothing; `gradients.py` and `plasticity.py` are policies, too.
`decide.py` asks them while training runs, `shapes.py` chooses stages and replicas,
`forecast.py` predicts how long the rest of a run takes, and `settings.py` checks what
the user says.
"""

from __future__ import annotations

from hocket.freeze.gradients import ArgminGradient, Percentile
from hocket.freeze.plasticity import Plasticity
from hocket.freeze.policy import Alpha, LayerObservation, Listed, Measures, Policy

__all__ = [
    "Alpha",
    "ArgminGradient",
    "LayerObservation",
    "Listed",
    "Measures",
    "Percentile",
    "Plasticity",
    "Policy",
]
